// The fused kernel for AVX2 with FMA. The target region opens after everything shared has been included: see
// simd_common.h.
#if defined(__x86_64__)

#include <immintrin.h>

#include "simd_common.h"

#define SELFATTN_ISA avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"

#include "../algorithm/fused_kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const Kernel kFusedAvx2;
const Kernel kFusedAvx2 = avx2::fused_kernel("avx2", "tiled online softmax, 256-bit vectors");
}  // namespace selfattn::cpu

#endif
