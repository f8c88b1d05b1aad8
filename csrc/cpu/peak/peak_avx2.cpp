// The loops of peak.h for AVX2 with FMA; about target regions see isa/simd_common.h.
#if defined(__x86_64__)

#include <immintrin.h>

#include "../isa/simd_common.h"
#include "peak.h"

#define SELFATTN_ISA avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC optimize("O3")
#pragma GCC target("avx2,fma,f16c")
#endif

#include "../isa/simd_avx2.h"

#include "peak_loops.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const PeakLoops kPeakAvx2;
const PeakLoops kPeakAvx2 = avx2::peak_loops("avx2");
}  // namespace selfattn::cpu

#endif
