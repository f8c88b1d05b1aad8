// Selected keys in the fused kernel for AVX-512 with bfloat16 products.
#if defined(__x86_64__)

#define SELFATTN_ISA avx512_bf16

#include "begin_avx512_bf16.h"
#include "simd_avx512.h"
#include "../pairs/engine_avx512.h"
#include "../pairs/pair_selected.h"
#include "end_target.h"

#endif
