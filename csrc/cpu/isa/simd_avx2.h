// Vectors of 256 bits: AVX2, FMA and F16C. See simd_avx512.h.
#pragma once

namespace selfattn::cpu::avx2 {

template <class T>
struct Simd;
template <class T>
struct LowerHalf;  // there is none, see kHalves

template <>
struct Simd<float> {
  using Vec = __m256;
  using Mask = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kTileRows = 4;  // 4 x 3 accumulators, 3 operands and a broadcast: all 16 registers
  static constexpr int kTileVecs = 3;
  static constexpr bool kLoadsParts = false;
  static constexpr bool kHalves = false;
  static constexpr bool kByLane = false;

  static SELFATTN_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static SELFATTN_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static SELFATTN_INLINE Vec set(float x) { return _mm256_set1_ps(x); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
  static SELFATTN_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
  static SELFATTN_INLINE Vec round(Vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // For integers n in [-126, 127].
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
  }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
  }

  static SELFATTN_INLINE Vec load_bfloat16(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static SELFATTN_INLINE void store_bfloat16(uint16_t* p, Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
    const __m256i halves = _mm256_srli_epi32(chosen, 16);
    const __m256i narrowed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(narrowed));
  }
  static SELFATTN_INLINE Vec load_float16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static SELFATTN_INLINE void store_float16(uint16_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // 0 where the byte is true, -inf where it is false.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m256i hidden = _mm256_cmpeq_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256());
    return _mm256_and_ps(_mm256_castsi256_ps(hidden),
                         _mm256_set1_ps(-std::numeric_limits<float>::infinity()));
  }

  // A 32-bit word per lane, in the low half of 64 bits; the high half is ignored.
  struct Words {
    __m256i even, odd;
  };
  static SELFATTN_INLINE Words words(uint32_t x) {
    const __m256i all = _mm256_set1_epi64x(x);
    return {all, all};
  }
  static SELFATTN_INLINE Words words_from(uint32_t first) {  // first + lane
    const __m256i lane = _mm256_setr_epi64x(0, 2, 4, 6);
    return {_mm256_add_epi64(lane, _mm256_set1_epi64x(first)),
            _mm256_add_epi64(lane, _mm256_set1_epi64x(static_cast<int64_t>(first) + 1))};
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {  // all 64 bits of the product
    const __m256i factor = _mm256_set1_epi64x(b);
    return {_mm256_mul_epu32(a.even, factor), _mm256_mul_epu32(a.odd, factor)};
  }
  static SELFATTN_INLINE Words high_words(Words a) {
    return {_mm256_srli_epi64(a.even, 32), _mm256_srli_epi64(a.odd, 32)};
  }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    const __m256i all = _mm256_set1_epi64x(c);
    return {_mm256_xor_si256(_mm256_xor_si256(a.even, b.even), all),
            _mm256_xor_si256(_mm256_xor_si256(a.odd, b.odd), all)};
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    // The comparison is signed, so both sides move by half the range.
    const __m256i half = _mm256_set1_epi32(INT32_MIN);
    const __m256i both = _mm256_blend_epi32(a.even, _mm256_shuffle_epi32(a.odd, 0xa0), 0xaa);
    const __m256i bound = _mm256_xor_si256(_mm256_set1_epi32(static_cast<int>(limit)), half);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(bound, _mm256_xor_si256(both, half)));
  }
};

template <>
struct Simd<double> {
  using Vec = __m256d;
  using Mask = __m256d;
  static constexpr int kWidth = 4;
  static constexpr int kTileRows = 4;
  static constexpr int kTileVecs = 3;
  static constexpr bool kLoadsParts = false;
  static constexpr bool kHalves = false;
  static constexpr bool kByLane = false;

  static SELFATTN_INLINE Vec load(const double* p) { return _mm256_loadu_pd(p); }
  static SELFATTN_INLINE void store(double* p, Vec v) { _mm256_storeu_pd(p, v); }
  static SELFATTN_INLINE Vec set(double x) { return _mm256_set1_pd(x); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return _mm256_add_pd(a, b); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_pd(a, b); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_pd(a, b); }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return _mm256_div_pd(a, b); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return _mm256_or_pd(a, b); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_pd(no, yes, m); }
  static SELFATTN_INLINE bool any(Mask m) { return _mm256_movemask_pd(m) != 0; }
  static SELFATTN_INLINE Vec round(Vec a) {
    return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // For integers n in [-1022, 1023]. Adding 1.5·2^52 leaves n in the low bits of the sum.
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) {
    const __m256i bits = _mm256_castpd_si256(_mm256_add_pd(n, _mm256_set1_pd(6755399441055744.0)));
    const __m256i exponent = _mm256_slli_epi64(_mm256_add_epi64(bits, _mm256_set1_epi64x(1023)), 52);
    return _mm256_mul_pd(a, _mm256_castsi256_pd(exponent));
  }
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) {
    return _mm256_permute2f128_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b), 0x20);
  }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) {
    return _mm256_permute2f128_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b), 0x31);
  }

  // See Simd<float>.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof(bytes));
    const __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    const __m256i hidden = _mm256_cmpeq_epi64(wide, _mm256_setzero_si256());
    return _mm256_and_pd(_mm256_castsi256_pd(hidden),
                         _mm256_set1_pd(-std::numeric_limits<double>::infinity()));
  }
  using Words = __m256i;
  static SELFATTN_INLINE Words words(uint32_t x) { return _mm256_set1_epi64x(x); }
  static SELFATTN_INLINE Words words_from(uint32_t first) {
    return _mm256_add_epi64(_mm256_setr_epi64x(0, 1, 2, 3), _mm256_set1_epi64x(first));
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {
    return _mm256_mul_epu32(a, _mm256_set1_epi64x(b));
  }
  static SELFATTN_INLINE Words high_words(Words a) { return _mm256_srli_epi64(a, 32); }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_set1_epi64x(c));
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    const __m256i word = _mm256_and_si256(a, _mm256_set1_epi64x(0xffffffff));
    return _mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_set1_epi64x(limit), word));
  }
};

}  // namespace selfattn::cpu::avx2
