// The loops of peak.h for AVX-512; about target regions see isa/simd_common.h.
#if defined(__x86_64__)

#include <immintrin.h>

#include "../isa/simd_common.h"
#include "peak.h"

#define SELFATTN_ISA avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // see kernels_avx512.cpp
#pragma GCC push_options
#pragma GCC optimize("O3")
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#include "../isa/simd_avx512.h"

#include "peak_loops.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const PeakLoops kPeakAvx512;
const PeakLoops kPeakAvx512 = avx512::peak_loops("avx512");
}  // namespace selfattn::cpu

#endif
