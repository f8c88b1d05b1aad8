// Selected keys in the fused kernel for AMX.
#if defined(__x86_64__)

#include "begin_amx.h"
#include "shared_by_amx.h"
#include "../pairs/engine_amx.h"
#include "../pairs/pair_selected.h"
#include "end_target.h"

#endif
