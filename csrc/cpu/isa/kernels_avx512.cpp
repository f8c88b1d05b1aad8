// The fused kernel for AVX-512. The target region opens after everything shared has been included: see
// simd_common.h.
#if defined(__x86_64__)

#include <immintrin.h>

#include "simd_common.h"

#define SELFATTN_ISA avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined_ps (GCC bug 105593)
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#include "simd_avx512.h"

#include "../algorithm/fused_kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const Kernel kFusedAvx512;
const Kernel kFusedAvx512 = avx512::fused_kernel("avx512", "tiled online softmax, 512-bit vectors");
}  // namespace selfattn::cpu

#endif
