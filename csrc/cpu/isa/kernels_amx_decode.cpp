// Decoding by the fused kernel for AMX.
#if defined(__x86_64__)

#include "begin_amx.h"
#include "../pairs/decode_by_tiles.h"
#include "../pairs/decode_by_vectors.h"
#include "../pairs/pair_decode.h"
#include "end_target.h"

#endif
