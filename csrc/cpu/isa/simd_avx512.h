// Vectors of 512 bits: AVX-512 F, DQ, BW, VL, for every instruction set that builds on them.
// docs/cpu-kernels.md, "The SIMD interface", describes the interface that the passes of fused/ are written
// over; simd_scalar.h is its shortest implementation.
#pragma once

// Vectors of a tile of the micro-kernel, and so of a strip of queries. AMX needs two, as whole tiles.
#ifndef SELFATTN_TILE_VECTORS
#define SELFATTN_TILE_VECTORS 3
#endif

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct Simd;
template <class T>
struct LowerHalf;

template <>
struct Simd<float> {
  using Vec = __m512;
  using Mask = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr int kTileRows = 8;  // 8 x 3 accumulators, 3 operands and a broadcast: 28 of 32 registers
  static constexpr int kTileVecs = SELFATTN_TILE_VECTORS;

  static constexpr bool kLoadsParts = true;
  static constexpr bool kHalves = true;
  static constexpr bool kByLane = false;

  static SELFATTN_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static SELFATTN_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static SELFATTN_INLINE Vec set(float x) { return _mm512_set1_ps(x); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
  static SELFATTN_INLINE bool any(Mask m) { return m != 0; }
  static SELFATTN_INLINE Vec round(Vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
  static SELFATTN_INLINE Vec fraction(Vec a) {  // a - floor(a)
    return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  // a * 2^floor(n), 0 where n < least, NaN where n is NaN
  static SELFATTN_INLINE Vec mul_pow2_floor_above(Vec a, Vec n, Vec least) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, least, _CMP_NLT_UQ), a, n);
  }
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) {
    const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, index, b);
  }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) {
    const __m512i index = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, index, b);
  }

  static SELFATTN_INLINE Vec load_bfloat16(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static SELFATTN_INLINE __m256i bfloat16_of(Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
  }
  static SELFATTN_INLINE void store_bfloat16(uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bfloat16_of(v));
  }
  static SELFATTN_INLINE Vec load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static SELFATTN_INLINE void store_float16(uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Parts of vectors: the first n <= kWidth elements in memory. Zeros fill the rest of what is loaded.
  static SELFATTN_INLINE Mask first(int64_t n) { return static_cast<Mask>((1u << n) - 1); }
  static SELFATTN_INLINE Vec load_part(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(first(n), p);
  }
  static SELFATTN_INLINE void store_part(float* p, int64_t n, Vec v) {
    _mm512_mask_storeu_ps(p, first(n), v);
  }
  static SELFATTN_INLINE Vec load_bfloat16_part(const uint16_t* p, int64_t n) {
    const __m256i bits = _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static SELFATTN_INLINE Vec load_float16_part(const uint16_t* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static SELFATTN_INLINE void store_bfloat16_part(uint16_t* p, int64_t n, Vec v) {
    _mm256_mask_storeu_epi16(p, first(n), bfloat16_of(v));
  }
  static SELFATTN_INLINE void store_float16_part(uint16_t* p, int64_t n, Vec v) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // 0 where the byte is true, -inf where it is false.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __mmask16 hidden = _mm_cmpeq_epi8_mask(bytes, _mm_setzero_si128());
    return _mm512_maskz_mov_ps(hidden, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
  }

  // A 32-bit word per lane, in the low half of 64 bits; the high half is ignored.
  struct Words {
    __m512i even, odd;
  };
  static SELFATTN_INLINE Words words(uint32_t x) {
    const __m512i all = _mm512_set1_epi64(x);
    return {all, all};
  }
  static SELFATTN_INLINE Words words_from(uint32_t first) {  // first + lane
    const __m512i lane = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    return {_mm512_add_epi64(lane, _mm512_set1_epi64(first)),
            _mm512_add_epi64(lane, _mm512_set1_epi64(static_cast<int64_t>(first) + 1))};
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {  // all 64 bits of the product
    const __m512i factor = _mm512_set1_epi64(b);
    return {_mm512_mul_epu32(a.even, factor), _mm512_mul_epu32(a.odd, factor)};
  }
  static SELFATTN_INLINE Words high_words(Words a) {
    return {_mm512_srli_epi64(a.even, 32), _mm512_srli_epi64(a.odd, 32)};
  }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    const __m512i all = _mm512_set1_epi64(c);
    return {_mm512_ternarylogic_epi64(a.even, b.even, all, 0x96),
            _mm512_ternarylogic_epi64(a.odd, b.odd, all, 0x96)};
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    const __m512i both = _mm512_mask_shuffle_epi32(a.even, 0xaaaa, a.odd, _MM_PERM_CCAA);
    return _mm512_cmplt_epu32_mask(both, _mm512_set1_epi32(static_cast<int>(limit)));
  }
};

template <>
struct Simd<double> {
  using Vec = __m512d;
  using Mask = __mmask8;
  static constexpr int kWidth = 8;
  static constexpr int kTileRows = 8;
  static constexpr int kTileVecs = 3;

  static constexpr bool kLoadsParts = true;
  static constexpr bool kHalves = true;
  static constexpr bool kByLane = false;

  static SELFATTN_INLINE Vec load(const double* p) { return _mm512_loadu_pd(p); }
  static SELFATTN_INLINE void store(double* p, Vec v) { _mm512_storeu_pd(p, v); }
  static SELFATTN_INLINE Vec set(double x) { return _mm512_set1_pd(x); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return _mm512_add_pd(a, b); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_pd(a, b); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_pd(a, b); }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return _mm512_div_pd(a, b); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return _mm512_max_pd(a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return _mm512_abs_pd(a); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_pd(m, no, yes); }
  static SELFATTN_INLINE bool any(Mask m) { return m != 0; }
  static SELFATTN_INLINE Vec round(Vec a) {
    return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) { return _mm512_scalef_pd(a, n); }
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) {
    return _mm512_permutex2var_pd(a, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), b);
  }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) {
    return _mm512_permutex2var_pd(a, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), b);
  }
  // See Simd<float>.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const auto hidden = static_cast<Mask>(_mm_cmpeq_epi8_mask(bytes, _mm_setzero_si128()));
    return _mm512_maskz_mov_pd(hidden, _mm512_set1_pd(-std::numeric_limits<double>::infinity()));
  }
  static SELFATTN_INLINE Mask first(int64_t n) { return static_cast<Mask>((1u << n) - 1); }
  static SELFATTN_INLINE Vec load_part(const double* p, int64_t n) {
    return _mm512_maskz_loadu_pd(first(n), p);
  }
  static SELFATTN_INLINE void store_part(double* p, int64_t n, Vec v) {
    _mm512_mask_storeu_pd(p, first(n), v);
  }

  // See Simd<float>.
  using Words = __m512i;
  static SELFATTN_INLINE Words words(uint32_t x) { return _mm512_set1_epi64(x); }
  static SELFATTN_INLINE Words words_from(uint32_t first) {
    return _mm512_add_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(first));
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {
    return _mm512_mul_epu32(a, _mm512_set1_epi64(b));
  }
  static SELFATTN_INLINE Words high_words(Words a) { return _mm512_srli_epi64(a, 32); }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    return _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi64(c), 0x96);
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    const __m512i word = _mm512_and_si512(a, _mm512_set1_epi64(0xffffffff));
    return _mm512_cmplt_epu64_mask(word, _mm512_set1_epi64(limit));
  }
};

// Vectors whose upper half does not count. What these functions return may hold anything there.
template <>
struct LowerHalf<float> : Simd<float> {
  static SELFATTN_INLINE __m256 low(Vec v) { return _mm512_castps512_ps256(v); }
  static SELFATTN_INLINE Vec whole(__m256 v) { return _mm512_castps256_ps512(v); }
  static SELFATTN_INLINE Vec zeros_above(Vec v) { return _mm512_maskz_mov_ps(0x00ff, v); }

  static SELFATTN_INLINE Vec load(const float* p) { return whole(_mm256_loadu_ps(p)); }
  static SELFATTN_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, low(v)); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return whole(_mm256_add_ps(low(a), low(b))); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return whole(_mm256_sub_ps(low(a), low(b))); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return whole(_mm256_mul_ps(low(a), low(b))); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return whole(_mm256_fmadd_ps(low(a), low(b), low(c)));
  }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return whole(_mm256_max_ps(low(a), low(b))); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps_mask(low(a), low(b), _CMP_LT_OQ); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return _mm256_cmp_ps_mask(low(a), low(b), _CMP_EQ_OQ); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) {
    return whole(_mm256_mask_blend_ps(static_cast<__mmask8>(m), low(no), low(yes)));
  }
  static SELFATTN_INLINE Vec round(Vec a) {
    return whole(_mm256_roundscale_ps(low(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) { return whole(_mm256_scalef_ps(low(a), low(n))); }
};

template <>
struct LowerHalf<double> : Simd<double> {
  static SELFATTN_INLINE __m256d low(Vec v) { return _mm512_castpd512_pd256(v); }
  static SELFATTN_INLINE Vec whole(__m256d v) { return _mm512_castpd256_pd512(v); }
  static SELFATTN_INLINE Vec zeros_above(Vec v) { return _mm512_maskz_mov_pd(0x0f, v); }

  static SELFATTN_INLINE Vec load(const double* p) { return whole(_mm256_loadu_pd(p)); }
  static SELFATTN_INLINE void store(double* p, Vec v) { _mm256_storeu_pd(p, low(v)); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return whole(_mm256_add_pd(low(a), low(b))); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return whole(_mm256_sub_pd(low(a), low(b))); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return whole(_mm256_mul_pd(low(a), low(b))); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return whole(_mm256_fmadd_pd(low(a), low(b), low(c)));
  }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return whole(_mm256_max_pd(low(a), low(b))); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_pd_mask(low(a), low(b), _CMP_LT_OQ); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return _mm256_cmp_pd_mask(low(a), low(b), _CMP_EQ_OQ); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) {
    return whole(_mm256_mask_blend_pd(static_cast<__mmask8>(m), low(no), low(yes)));
  }
  static SELFATTN_INLINE Vec round(Vec a) {
    return whole(_mm256_roundscale_pd(low(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) { return whole(_mm256_scalef_pd(low(a), low(n))); }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
