// Opens the target region of AVX2 with FMA. What is defined from here to end_target.h is compiled for it;
// everything shared is included before, see simd_common.h.
#pragma once

#include <immintrin.h>

#include "simd_common.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,fma,f16c")
#endif
