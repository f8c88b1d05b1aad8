// The fused kernel for AVX-512 with bfloat16 products: see kernels_avx512.cpp, which it hands on what it has
// no faster way for.
#if defined(__x86_64__)

#include <immintrin.h>

#include "simd_common.h"

#define SELFATTN_ISA avx512_bf16
#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // see kernels_avx512.cpp
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif

#include "simd_avx512.h"

#include "../bfloat16/engine_avx512.h"

#include "../bfloat16/decode_by_vectors.h"

#include "../bfloat16/pair_kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const Kernel kFusedAvx512Bf16;
const Kernel kFusedAvx512Bf16 = avx512_bf16::pair_kernel<avx512_bf16::GainingCalls>(
    "avx512_bf16", "tiled online softmax, products of bfloat16 pairs");
}  // namespace selfattn::cpu

#endif
