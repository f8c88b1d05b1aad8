// Selected keys in the fused kernel for AVX2 with FMA.
#if defined(__x86_64__)

#define SELFATTN_ISA avx2

#include "begin_avx2.h"
#include "simd_avx2.h"
#include "../sparse/direct_selected.h"
#include "end_target.h"

#endif
