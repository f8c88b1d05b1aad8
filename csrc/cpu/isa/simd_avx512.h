// Vectors of 512 bits: AVX-512 F, DQ, BW, VL, for every instruction set that builds on them. The interface
// that the algorithms are written over is documented in docs/cpu-kernels.md, "The SIMD interface";
// simd_scalar.h is its shortest implementation.
#pragma once

// Vectors of a tile of the micro-kernel, and so of a strip of queries; AMX wants whole tiles of two.
#ifndef SELFATTN_TILE_VECTORS
#define SELFATTN_TILE_VECTORS 3
#endif

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  using Vec = __m512;
  using Mask = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr int kTileRows = 8;  // 8 x 3 accumulators, 3 operands and a broadcast: 28 of 32 registers
  static constexpr int kTileVecs = SELFATTN_TILE_VECTORS;

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
  static SELFATTN_INLINE void store_bfloat16(uint16_t* p, Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i result = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
  }
  static SELFATTN_INLINE Vec load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static SELFATTN_INLINE void store_float16(uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // 0 where the byte is true, -inf where it is false.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __mmask16 hidden = _mm_cmpeq_epi8_mask(bytes, _mm_setzero_si128());
    return _mm512_maskz_mov_ps(hidden, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
  }
};

template <>
struct Simd<double> {
  using Vec = __m512d;
  using Mask = __mmask8;
  static constexpr int kWidth = 8;
  static constexpr int kTileRows = 8;
  static constexpr int kTileVecs = 3;

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
};

}  // namespace selfattn::cpu::SELFATTN_ISA
