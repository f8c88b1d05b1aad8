// The backward of the fused kernel for AMX.
#if defined(__x86_64__)

#include "begin_amx.h"
#include "shared_by_amx.h"
#include "../pairs/gradient_pipeline.h"
#include "../pairs/pair_backward.h"
#include "end_target.h"

#endif
