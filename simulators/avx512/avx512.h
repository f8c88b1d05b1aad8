// The AVX-512 intrinsics that the kernels use, as functions for processors that have AVX2 alone. build.py
// compiles a copy of the kernels in which _mm512_add_ps is emulated512::add_ps. Each function does what
// Intel's Intrinsics Guide says of the intrinsic, for every value, except for the payload of a NaN.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define SELFATTN_EMULATED inline __attribute__((always_inline))
// Long functions are called, so that the kernels stay as small as they are.
#define SELFATTN_CALLED inline __attribute__((noinline))

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace emulated512 {

// Vectors of 512 bits by the type of their elements; converting one to another keeps the bits.
typedef int16_t Int16 __attribute__((vector_size(64), may_alias));
typedef int32_t Int32 __attribute__((vector_size(64), may_alias));
typedef uint32_t UInt32 __attribute__((vector_size(64), may_alias));
typedef uint64_t UInt64 __attribute__((vector_size(64), may_alias));

template <class To, class From>
SELFATTN_EMULATED To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <class Half, class Whole>
SELFATTN_EMULATED Half half(Whole v, int which) {
  Half result;
  std::memcpy(&result, reinterpret_cast<const char*>(&v) + which * sizeof(Half), sizeof(Half));
  return result;
}
template <class Whole, class Half>
SELFATTN_EMULATED Whole joined(Half low, Half high) {
  Whole result;
  std::memcpy(&result, &low, sizeof(low));
  std::memcpy(reinterpret_cast<char*>(&result) + sizeof(low), &high, sizeof(high));
  return result;
}
template <class V>
constexpr unsigned kCount = sizeof(V) / sizeof(V{}[0]);

// --- memory ------------------------------------------------------------------------------------------------

template <class V>
SELFATTN_EMULATED V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
SELFATTN_EMULATED __m512 loadu_ps(const void* from) { return load<__m512>(from); }
SELFATTN_EMULATED __m512d loadu_pd(const void* from) { return load<__m512d>(from); }
SELFATTN_EMULATED __m512i loadu_si512(const void* from) { return load<__m512i>(from); }
SELFATTN_EMULATED void storeu_ps(void* to, __m512 v) { std::memcpy(to, &v, sizeof(v)); }
SELFATTN_EMULATED void storeu_pd(void* to, __m512d v) { std::memcpy(to, &v, sizeof(v)); }
SELFATTN_EMULATED void storeu_si512(void* to, __m512i v) { std::memcpy(to, &v, sizeof(v)); }

// These need an aligned address on the processor, too.
inline void check_aligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 64 != 0) __builtin_trap();
}
SELFATTN_EMULATED __m512 load_ps(const void* from) {
  check_aligned(from);
  return loadu_ps(from);
}
SELFATTN_EMULATED void store_si512(void* to, __m512i v) {
  check_aligned(to);
  storeu_si512(to, v);
}

// Memory of an element whose bit is 0 is not touched.
template <class V, class E>
SELFATTN_EMULATED V load_some(uint64_t mask, const void* from) {
  E elements[sizeof(V) / sizeof(E)] = {};
  for (unsigned i = 0; i < sizeof(V) / sizeof(E); ++i) {
    if ((mask >> i & 1) != 0) std::memcpy(&elements[i], static_cast<const E*>(from) + i, sizeof(E));
  }
  return load<V>(elements);
}
SELFATTN_CALLED __m512 maskz_loadu_ps(__mmask16 mask, const void* from) {
  return load_some<__m512, float>(mask, from);
}
SELFATTN_CALLED __m512d maskz_loadu_pd(__mmask8 mask, const void* from) {
  return load_some<__m512d, double>(mask, from);
}
SELFATTN_CALLED __m512i maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return load_some<__m512i, int16_t>(mask, from);
}
SELFATTN_CALLED __m256i maskz_loadu_epi16_of_256(__mmask16 mask, const void* from) {
  return load_some<__m256i, int16_t>(mask, from);
}
template <class E, class V>
SELFATTN_EMULATED void store_some(void* to, uint64_t mask, V v) {
  E elements[sizeof(V) / sizeof(E)];
  std::memcpy(elements, &v, sizeof(v));
  for (unsigned i = 0; i < sizeof(V) / sizeof(E); ++i) {
    if ((mask >> i & 1) != 0) std::memcpy(static_cast<E*>(to) + i, &elements[i], sizeof(E));
  }
}
SELFATTN_CALLED void mask_storeu_ps(void* to, __mmask16 mask, __m512 v) { store_some<float>(to, mask, v); }
SELFATTN_CALLED void mask_storeu_pd(void* to, __mmask8 mask, __m512d v) { store_some<double>(to, mask, v); }
SELFATTN_CALLED void mask_storeu_epi16_of_256(void* to, __mmask16 mask, __m256i v) {
  store_some<int16_t>(to, mask, v);
}

// --- the same in every element, and given ones ------------------------------------------------------------

SELFATTN_EMULATED __m512 set1_ps(float x) { return x - __m512{}; }
SELFATTN_EMULATED __m512d set1_pd(double x) { return x - __m512d{}; }
SELFATTN_EMULATED __m512i set1_epi16(int16_t x) { return (__m512i)(x + Int16{}); }
SELFATTN_EMULATED __m512i set1_epi32(int32_t x) { return (__m512i)(x + Int32{}); }
SELFATTN_EMULATED __m512i set1_epi64(int64_t x) { return x + __m512i{}; }
SELFATTN_EMULATED __m512 setzero_ps() { return __m512{}; }
SELFATTN_EMULATED __m512 undefined_ps() { return set1_ps(std::numeric_limits<float>::quiet_NaN()); }
SELFATTN_EMULATED __m512i setzero_si512() { return __m512i{}; }
template <class... E>
SELFATTN_EMULATED __m512i setr_epi32(E... elements) {
  return (__m512i)Int32{elements...};
}
template <class... E>
SELFATTN_EMULATED __m512i setr_epi64(E... elements) {
  return __m512i{elements...};
}
template <class... E>
SELFATTN_CALLED __m512i set_epi16(E... elements) {  // the last one first
  const int16_t backwards[] = {static_cast<int16_t>(elements)...};
  Int16 result;
  for (unsigned i = 0; i < 32; ++i) result[i] = backwards[31 - i];
  return (__m512i)result;
}

SELFATTN_EMULATED __m512 castsi512_ps(__m512i v) { return (__m512)v; }
SELFATTN_EMULATED __m512i castps_si512(__m512 v) { return (__m512i)v; }
SELFATTN_EMULATED __m256i castsi512_si256(__m512i v) { return half<__m256i>(v, 0); }
SELFATTN_EMULATED __m512 castps128_ps512(__m128 v) { return joined<__m512>(v, v); }
SELFATTN_EMULATED __m256 castps512_ps256(__m512 v) { return half<__m256>(v, 0); }
SELFATTN_EMULATED __m256d castpd512_pd256(__m512d v) { return half<__m256d>(v, 0); }
// The upper half is undefined. NaN shows where a kernel uses it.
SELFATTN_EMULATED __m512 castps256_ps512(__m256 v) {
  return joined<__m512>(v, _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}
SELFATTN_EMULATED __m512d castpd256_pd512(__m256d v) {
  return joined<__m512d>(v, _mm256_set1_pd(std::numeric_limits<double>::quiet_NaN()));
}
SELFATTN_EMULATED float cvtss_f32(__m512 v) { return v[0]; }

// --- arithmetic --------------------------------------------------------------------------------------------

SELFATTN_CALLED __m512 add_ps(__m512 a, __m512 b) { return a + b; }
SELFATTN_CALLED __m512 sub_ps(__m512 a, __m512 b) { return a - b; }
SELFATTN_CALLED __m512 mul_ps(__m512 a, __m512 b) { return a * b; }
SELFATTN_CALLED __m512 div_ps(__m512 a, __m512 b) { return a / b; }
SELFATTN_CALLED __m512d add_pd(__m512d a, __m512d b) { return a + b; }
SELFATTN_CALLED __m512d sub_pd(__m512d a, __m512d b) { return a - b; }
SELFATTN_CALLED __m512d mul_pd(__m512d a, __m512d b) { return a * b; }
SELFATTN_CALLED __m512d div_pd(__m512d a, __m512d b) { return a / b; }
SELFATTN_CALLED __m512i add_epi16(__m512i a, __m512i b) { return (__m512i)((Int16)a + (Int16)b); }
SELFATTN_CALLED __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((UInt32)a + (UInt32)b); }
SELFATTN_CALLED __m512i sub_epi32(__m512i a, __m512i b) { return (__m512i)((UInt32)a - (UInt32)b); }
SELFATTN_CALLED __m512i add_epi64(__m512i a, __m512i b) { return (__m512i)((UInt64)a + (UInt64)b); }
SELFATTN_CALLED __m512i mul_epu32(__m512i a, __m512i b) {
  return (__m512i)(((UInt64)a & 0xffffffff) * ((UInt64)b & 0xffffffff));
}

SELFATTN_CALLED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const auto part = [&](int i) {
    return _mm256_fmadd_ps(half<__m256>(a, i), half<__m256>(b, i), half<__m256>(c, i));
  };
  return joined<__m512>(part(0), part(1));
}
SELFATTN_CALLED __m512d fmadd_pd(__m512d a, __m512d b, __m512d c) {
  const auto part = [&](int i) {
    return _mm256_fmadd_pd(half<__m256d>(a, i), half<__m256d>(b, i), half<__m256d>(c, i));
  };
  return joined<__m512d>(part(0), part(1));
}

// The result is the second operand where the two are equal or one of them is NaN.
SELFATTN_CALLED __m512 max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
SELFATTN_CALLED __m512d max_pd(__m512d a, __m512d b) { return a > b ? a : b; }
SELFATTN_CALLED __m512i max_epu32(__m512i a, __m512i b) {
  return (__m512i)((UInt32)a > (UInt32)b ? (UInt32)a : (UInt32)b);
}
SELFATTN_CALLED __m512i min_epu32(__m512i a, __m512i b) {
  return (__m512i)((UInt32)a < (UInt32)b ? (UInt32)a : (UInt32)b);
}

SELFATTN_CALLED __m512i and_si512(__m512i a, __m512i b) { return a & b; }
SELFATTN_CALLED __m512i or_si512(__m512i a, __m512i b) { return a | b; }
SELFATTN_CALLED __m512i slli_epi32(__m512i a, unsigned count) { return (__m512i)((UInt32)a << count); }
SELFATTN_CALLED __m512i srli_epi32(__m512i a, unsigned count) { return (__m512i)((UInt32)a >> count); }
SELFATTN_CALLED __m512i srli_epi64(__m512i a, unsigned count) { return (__m512i)((UInt64)a >> count); }
SELFATTN_CALLED __m512i ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result{};
  for (int row = 0; row < 8; ++row) {
    const __m512i here = ((row & 4) != 0 ? a : ~a) & ((row & 2) != 0 ? b : ~b) & ((row & 1) != 0 ? c : ~c);
    if ((table >> row & 1) != 0) result |= here;
  }
  return result;
}
SELFATTN_CALLED __m512 abs_ps(__m512 a) { return (__m512)((UInt32)a << 1 >> 1); }
SELFATTN_CALLED __m512d abs_pd(__m512d a) { return (__m512d)((UInt64)a << 1 >> 1); }

}  // namespace emulated512

#include "avx512_elements.h"

#pragma GCC pop_options
