// Decoding by the fused kernel for AMX. It is a source of its own, since it is a third of that kernel's code
// and of the time to compile it.
#if defined(__x86_64__)

#include "begin_amx.h"
#include "../pairs/decode_by_tiles.h"
#include "../pairs/decode_by_vectors.h"
#include "../pairs/pair_decode.h"
#include "end_target.h"

#endif
