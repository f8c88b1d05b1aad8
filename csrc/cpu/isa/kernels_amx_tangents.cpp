// Forward mode and second derivatives of the fused kernel for AMX.
#if defined(__x86_64__)

#include "begin_amx.h"
#include "shared_by_amx.h"
#include "../pairs/exact_by_tiles.h"
#include "../pairs/pair_tangents.h"
#include "end_target.h"

#endif
