// The part of avx512.h that moves, chooses, compares, converts or sums elements one by one.
#pragma once

namespace emulated512 {

// --- comparisons and choices -------------------------------------------------------------------------------

template <class E>
SELFATTN_EMULATED bool compare(E a, E b, int predicate) {
  switch (predicate) {
    case _CMP_EQ_OQ:
      return a == b;
    case _CMP_NEQ_UQ:
      return !(a == b);
    case _CMP_LT_OQ:
      return a < b;
    case _CMP_LE_OQ:
      return a <= b;
    case _CMP_UNORD_Q:
      return std::isunordered(a, b);
    case _CMP_NLT_UQ:
      return !(a < b);
    default:  // to be added
      __builtin_trap();
  }
}
template <class V, class F>
SELFATTN_EMULATED uint64_t mask_of(V a, V b, const F& holds) {
  uint64_t mask = 0;
  for (unsigned i = 0; i < kCount<V>; ++i) mask |= uint64_t{holds(a[i], b[i])} << i;
  return mask;
}
SELFATTN_CALLED __mmask16 cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  return static_cast<__mmask16>(mask_of(a, b, [&](float x, float y) { return compare(x, y, predicate); }));
}
SELFATTN_EMULATED __mmask16 mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int predicate) {
  return mask & cmp_ps_mask(a, b, predicate);
}
SELFATTN_CALLED __mmask8 cmp_pd_mask(__m512d a, __m512d b, int predicate) {
  return static_cast<__mmask8>(mask_of(a, b, [&](double x, double y) { return compare(x, y, predicate); }));
}
SELFATTN_CALLED __mmask16 cmplt_epu32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(mask_of((UInt32)a, (UInt32)b, [](uint32_t x, uint32_t y) { return x < y; }));
}
SELFATTN_EMULATED __mmask16 cmpgt_epu32_mask(__m512i a, __m512i b) { return cmplt_epu32_mask(b, a); }
SELFATTN_EMULATED __mmask16 cmpge_epu32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(~cmplt_epu32_mask(a, b));
}
SELFATTN_CALLED __mmask8 cmplt_epu64_mask(__m512i a, __m512i b) {
  return static_cast<__mmask8>(mask_of((UInt64)a, (UInt64)b, [](uint64_t x, uint64_t y) { return x < y; }));
}
SELFATTN_CALLED __mmask32 cmpeq_epi16_mask(__m512i a, __m512i b) {
  return static_cast<__mmask32>(mask_of((Int16)a, (Int16)b, [](int16_t x, int16_t y) { return x == y; }));
}
SELFATTN_CALLED __mmask16 test_epi32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(
      mask_of((UInt32)a, (UInt32)b, [](uint32_t x, uint32_t y) { return (x & y) != 0; }));
}
SELFATTN_CALLED __mmask16 cmpeq_epi8_mask_of_128(__m128i a, __m128i b) {
  return static_cast<__mmask16>(_mm_movemask_epi8(_mm_cmpeq_epi8(a, b)));
}

template <class V>
SELFATTN_EMULATED V choose(uint64_t mask, V no, V yes) {
  for (unsigned i = 0; i < kCount<V>; ++i) no[i] = (mask >> i & 1) != 0 ? yes[i] : no[i];
  return no;
}
SELFATTN_CALLED __m512 mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) { return choose(mask, no, yes); }
SELFATTN_CALLED __m512d mask_blend_pd(__mmask8 mask, __m512d no, __m512d yes) {
  return choose(mask, no, yes);
}
SELFATTN_CALLED __m512i mask_blend_epi32(__mmask16 mask, __m512i no, __m512i yes) {
  return (__m512i)choose(mask, (Int32)no, (Int32)yes);
}
SELFATTN_CALLED __m512i mask_blend_epi16(__mmask32 mask, __m512i no, __m512i yes) {
  return (__m512i)choose(mask, (Int16)no, (Int16)yes);
}
SELFATTN_CALLED __m512 mask_mov_ps(__m512 no, __mmask16 mask, __m512 yes) { return choose(mask, no, yes); }
SELFATTN_CALLED __m512 maskz_mov_ps(__mmask16 mask, __m512 yes) { return choose(mask, __m512{}, yes); }
SELFATTN_CALLED __m512d maskz_mov_pd(__mmask8 mask, __m512d yes) { return choose(mask, __m512d{}, yes); }
SELFATTN_EMULATED __m512 maskz_mul_ps(__mmask16 mask, __m512 a, __m512 b) {
  return maskz_mov_ps(mask, mul_ps(a, b));
}

// --- order of elements -------------------------------------------------------------------------------------

template <class V, class Index>
SELFATTN_EMULATED V taken_from_both(V a, Index index, V b) {
  V result;
  for (unsigned i = 0; i < kCount<V>; ++i) {
    const auto at = static_cast<uint64_t>(index[i]) % (2 * kCount<V>);
    result[i] = at < kCount<V> ? a[at] : b[at - kCount<V>];
  }
  return result;
}
SELFATTN_CALLED __m512 permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return taken_from_both(a, (UInt32)index, b);
}
SELFATTN_CALLED __m512d permutex2var_pd(__m512d a, __m512i index, __m512d b) {
  return taken_from_both(a, (UInt64)index, b);
}
SELFATTN_CALLED __m512i permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return (__m512i)taken_from_both((Int16)a, (Int16)index, (Int16)b);
}
SELFATTN_CALLED __m512i permutexvar_epi16(__m512i index, __m512i a) {
  return permutex2var_epi16(a, index & set1_epi16(31), a);
}

// Interleaves halves of both vectors within each 128 bits: low halves if `which` is 0, high ones if 1.
template <class V>
SELFATTN_EMULATED V interleaved(V a, V b, unsigned which) {
  constexpr unsigned kPart = 16 / sizeof(a[0]);
  V result;
  for (unsigned i = 0; i < kCount<V>; ++i) {
    const unsigned at = i / kPart * kPart + which * kPart / 2 + i % kPart / 2;
    result[i] = i % 2 == 0 ? a[at] : b[at];
  }
  return result;
}
SELFATTN_CALLED __m512 unpacklo_ps(__m512 a, __m512 b) { return interleaved(a, b, 0); }
SELFATTN_CALLED __m512 unpackhi_ps(__m512 a, __m512 b) { return interleaved(a, b, 1); }
SELFATTN_CALLED __m512i unpacklo_epi16(__m512i a, __m512i b) {
  return (__m512i)interleaved((Int16)a, (Int16)b, 0);
}
SELFATTN_CALLED __m512i unpackhi_epi16(__m512i a, __m512i b) {
  return (__m512i)interleaved((Int16)a, (Int16)b, 1);
}

SELFATTN_CALLED __m512 shuffle_ps(__m512 a, __m512 b, int order) {
  __m512 result;
  for (unsigned i = 0; i < 16; ++i) {
    const unsigned at = i / 4 * 4 + (order >> i % 4 * 2 & 3);
    result[i] = i % 4 < 2 ? a[at] : b[at];
  }
  return result;
}
SELFATTN_CALLED __m512i mask_shuffle_epi32(__m512i no, __mmask16 mask, __m512i v, int order) {
  return (__m512i)choose(mask, (Int32)no, (Int32)shuffle_ps((__m512)v, (__m512)v, order));
}
SELFATTN_CALLED __m512i mask_shuffle_epi8(__m512i no, __mmask64 mask, __m512i v, __m512i order) {
  typedef uint8_t Bytes __attribute__((vector_size(64), may_alias));
  const Bytes from = (Bytes)v, index = (Bytes)order;
  Bytes result = (Bytes)no;
  for (unsigned i = 0; i < 64; ++i) {
    if ((mask >> i & 1) == 0) continue;
    result[i] = index[i] >= 128 ? 0 : from[i / 16 * 16 + index[i] % 16];
  }
  return (__m512i)result;
}
SELFATTN_CALLED __m512i shuffle_i64x2(__m512i a, __m512i b, int order) {
  __m512i result;
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned at = (order >> i / 2 * 2 & 3) * 2 + i % 2;
    result[i] = i < 4 ? a[at] : b[at];
  }
  return result;
}
SELFATTN_EMULATED __m512 insertf32x4(__m512 v, __m128 part, int which) {
  std::memcpy(reinterpret_cast<char*>(&v) + which * 16, &part, 16);
  return v;
}
SELFATTN_EMULATED __m512i inserti64x4(__m512i v, __m256i part, int which) {
  std::memcpy(reinterpret_cast<char*>(&v) + which * 32, &part, 32);
  return v;
}
SELFATTN_EMULATED __m256i extracti64x4_epi64(__m512i v, int which) { return half<__m256i>(v, which); }

// --- sums and extremes of a vector, in the order of the compilers' own headers -----------------------------

SELFATTN_CALLED float reduce_add_ps(__m512 v) {
  const __m256 eight = half<__m256>(v, 0) + half<__m256>(v, 1);
  const __m128 four = half<__m128>(eight, 0) + half<__m128>(eight, 1);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
SELFATTN_CALLED uint32_t reduce_max_epu32(__m512i v) {
  uint32_t most = 0;
  for (unsigned i = 0; i < 16; ++i) most = ((UInt32)v)[i] > most ? ((UInt32)v)[i] : most;
  return most;
}

// --- powers of two and whole numbers -----------------------------------------------------------------------

// a * 2^floor(b)
template <class E>
SELFATTN_EMULATED E scaled(E a, E b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (std::isinf(b)) {
    if (b > 0 ? a == 0 : std::isinf(a)) return std::numeric_limits<E>::quiet_NaN();
    return b > 0 ? a * b : std::copysign(E(0), a);
  }
  const E far = 5000;  // beyond every exponent
  return std::ldexp(a, static_cast<int>(std::floor(b < -far ? -far : b > far ? far : b)));
}
template <class V>
SELFATTN_EMULATED V all_scaled(V a, V b) {
  for (unsigned i = 0; i < kCount<V>; ++i) a[i] = scaled(a[i], b[i]);
  return a;
}
SELFATTN_CALLED __m512 scalef_ps(__m512 a, __m512 b) { return all_scaled(a, b); }
SELFATTN_CALLED __m512d scalef_pd(__m512d a, __m512d b) { return all_scaled(a, b); }
SELFATTN_EMULATED __m512 maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  return maskz_mov_ps(mask, scalef_ps(a, b));
}

// The kernels round to the nearest whole number and reduce by the one below; other modes end the process.
SELFATTN_CALLED __m512 roundscale_ps(__m512 a, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  for (unsigned i = 0; i < 16; ++i) a[i] = std::nearbyint(a[i]);
  return a;
}
SELFATTN_CALLED __m512d roundscale_pd(__m512d a, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  for (unsigned i = 0; i < 8; ++i) a[i] = std::nearbyint(a[i]);
  return a;
}
// Instructions of AVX512VL on 256 bits.
SELFATTN_CALLED __mmask8 cmp_ps_mask_of_256(__m256 a, __m256 b, int predicate) {
  return static_cast<__mmask8>(mask_of(a, b, [&](float x, float y) { return compare(x, y, predicate); }));
}
SELFATTN_CALLED __mmask8 cmp_pd_mask_of_256(__m256d a, __m256d b, int predicate) {
  return static_cast<__mmask8>(mask_of(a, b, [&](double x, double y) { return compare(x, y, predicate); }));
}
SELFATTN_CALLED __m256 mask_blend_ps_of_256(__mmask8 mask, __m256 no, __m256 yes) {
  return choose(mask, no, yes);
}
SELFATTN_CALLED __m256d mask_blend_pd_of_256(__mmask8 mask, __m256d no, __m256d yes) {
  return choose(mask, no, yes);
}
SELFATTN_CALLED __m256 scalef_ps_of_256(__m256 a, __m256 b) { return all_scaled(a, b); }
SELFATTN_CALLED __m256d scalef_pd_of_256(__m256d a, __m256d b) { return all_scaled(a, b); }
SELFATTN_EMULATED __m256 roundscale_ps_of_256(__m256 a, int how) {
  return half<__m256>(roundscale_ps(joined<__m512>(a, a), how), 0);
}
SELFATTN_EMULATED __m256d roundscale_pd_of_256(__m256d a, int how) {
  return half<__m256d>(roundscale_pd(joined<__m512d>(a, a), how), 0);
}

SELFATTN_CALLED __m512 reduce_ps(__m512 a, int how) {
  if (how != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) __builtin_trap();
  for (unsigned i = 0; i < 16; ++i) a[i] = std::isinf(a[i]) ? 0.0f : a[i] - std::floor(a[i]);
  return a;
}

// --- other types -------------------------------------------------------------------------------------------

SELFATTN_EMULATED __m512i cvtepu16_epi32(__m256i v) {
  return joined<__m512i>(_mm256_cvtepu16_epi32(half<__m128i>(v, 0)),
                         _mm256_cvtepu16_epi32(half<__m128i>(v, 1)));
}
SELFATTN_CALLED __m256i cvtepi32_epi16(__m512i v) {  // cut off
  int16_t low[16];
  for (unsigned i = 0; i < 16; ++i) low[i] = static_cast<int16_t>(((Int32)v)[i]);
  return load<__m256i>(low);
}
SELFATTN_EMULATED __m512 cvtph_ps(__m256i v) {
  return joined<__m512>(_mm256_cvtph_ps(half<__m128i>(v, 0)), _mm256_cvtph_ps(half<__m128i>(v, 1)));
}
SELFATTN_EMULATED __m256i cvtps_ph(__m512 v, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  return joined<__m256i>(_mm256_cvtps_ph(half<__m256>(v, 0), _MM_FROUND_TO_NEAREST_INT),
                         _mm256_cvtps_ph(half<__m256>(v, 1), _MM_FROUND_TO_NEAREST_INT));
}

// These instructions take subnormal numbers as zero and give none.
SELFATTN_EMULATED float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
SELFATTN_EMULATED float from_bfloat16(uint32_t bits) { return flushed(bits_as<float>(bits << 16)); }
SELFATTN_EMULATED uint16_t to_bfloat16(float x) {
  const auto bits = bits_as<uint32_t>(flushed(x));
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
SELFATTN_CALLED __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  uint16_t result[32];
  for (unsigned i = 0; i < 16; ++i) {
    result[i] = to_bfloat16(low[i]);
    result[i + 16] = to_bfloat16(high[i]);
  }
  return load<__m512bh>(result);
}
// The second product of each pair is added first; every sum is rounded.
SELFATTN_CALLED __m512 add_dots(__m512 sum, UInt32 a, UInt32 b) {
  for (unsigned i = 0; i < 16; ++i) {
    const uint32_t x = a[i], y = b[i];
    const float second = std::fma(from_bfloat16(x >> 16), from_bfloat16(y >> 16), flushed(sum[i]));
    sum[i] = flushed(std::fma(from_bfloat16(x & 0xffff), from_bfloat16(y & 0xffff), flushed(second)));
  }
  return sum;
}
template <class Pairs>
SELFATTN_EMULATED __m512 dpbf16_ps(__m512 sum, Pairs a, Pairs b) {
  return add_dots(sum, (UInt32)a, (UInt32)b);
}

}  // namespace emulated512
