// Selected keys in the fused kernel for AVX-512.
#if defined(__x86_64__)

#define SELFATTN_ISA avx512

#include "begin_avx512.h"
#include "simd_avx512.h"
#include "../sparse/direct_selected.h"
#include "end_target.h"

#endif
