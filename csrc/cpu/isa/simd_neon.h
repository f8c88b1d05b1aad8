// Vectors of 128 bits: NEON, a part of every arm64 processor. See simd_avx512.h.
#pragma once

namespace selfattn::cpu::neon {

template <class T>
struct Simd;
template <class T>
struct LowerHalf;  // there is none, see kHalves

template <>
struct Simd<float> {
  using Vec = float32x4_t;
  using Mask = uint32x4_t;
  static constexpr int kWidth = 4;
  static constexpr int kTileRows =
      6;  // 6 x 3 accumulators, 3 operands and 6 vectors of factors: 27 of 32 registers
  static constexpr int kTileVecs = 3;
  static constexpr bool kLoadsParts = false;
  static constexpr bool kHalves = false;
  static constexpr bool kByLane = true;

  static SELFATTN_INLINE Vec load(const float* p) { return vld1q_f32(p); }
  static SELFATTN_INLINE void store(float* p, Vec v) { vst1q_f32(p, v); }
  static SELFATTN_INLINE Vec set(float x) { return vdupq_n_f32(x); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  // a * b[lane] + c, for a constant lane.
  static SELFATTN_INLINE Vec fma_lane(Vec a, Vec b, int lane, Vec c) {
    switch (lane) {
      case 0:
        return vfmaq_laneq_f32(c, a, b, 0);
      case 1:
        return vfmaq_laneq_f32(c, a, b, 1);
      case 2:
        return vfmaq_laneq_f32(c, a, b, 2);
      default:
        return vfmaq_laneq_f32(c, a, b, 3);
    }
  }
  // This is not vmaxq_f32, which returns NaN where either operand is NaN.
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return vabsq_f32(a); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return vcltq_f32(a, b); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return vceqq_f32(a, b); }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return vorrq_u32(a, b); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) { return vbslq_f32(m, yes, no); }
  static SELFATTN_INLINE bool any(Mask m) { return vmaxvq_u32(m) != 0; }
  static SELFATTN_INLINE Vec round(Vec a) { return vrndnq_f32(a); }
  // For integers n in [-126, 127].
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) {
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  }
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) { return vzip1q_f32(a, b); }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) { return vzip2q_f32(a, b); }

  static SELFATTN_INLINE Vec load_bfloat16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  static SELFATTN_INLINE void store_bfloat16(uint16_t* p, Vec v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16));
  }
  static SELFATTN_INLINE Vec load_float16(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  static SELFATTN_INLINE void store_float16(uint16_t* p, Vec v) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
  }
  // 0 where the byte is true, -inf where it is false.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    uint32_t four;
    memcpy(&four, p, sizeof(four));
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    const uint32x4_t hidden = vceqzq_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
    const Vec infinity = set(-std::numeric_limits<float>::infinity());
    return vreinterpretq_f32_u32(vandq_u32(hidden, vreinterpretq_u32_f32(infinity)));
  }

  // A 32-bit word per lane, in the low half of 64 bits; the high half is ignored.
  struct Words {
    uint64x2_t low, high;  // lanes 0 and 1, lanes 2 and 3
  };
  static SELFATTN_INLINE Words words(uint32_t x) { return {vdupq_n_u64(x), vdupq_n_u64(x)}; }
  static SELFATTN_INLINE Words words_from(uint32_t first) {  // first + lane
    const uint64x2_t low = vaddq_u64(vcombine_u64(vcreate_u64(0), vcreate_u64(1)), vdupq_n_u64(first));
    return {low, vaddq_u64(low, vdupq_n_u64(2))};
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {  // all 64 bits of the product
    const uint32x2_t factor = vdup_n_u32(b);
    return {vmull_u32(vmovn_u64(a.low), factor), vmull_u32(vmovn_u64(a.high), factor)};
  }
  static SELFATTN_INLINE Words high_words(Words a) {
    return {vshrq_n_u64(a.low, 32), vshrq_n_u64(a.high, 32)};
  }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    const uint64x2_t all = vdupq_n_u64(c);
    return {veorq_u64(veorq_u64(a.low, b.low), all), veorq_u64(veorq_u64(a.high, b.high), all)};
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    const uint32x4_t word = vuzp1q_u32(vreinterpretq_u32_u64(a.low), vreinterpretq_u32_u64(a.high));
    return vcltq_u32(word, vdupq_n_u32(limit));
  }
};

template <>
struct Simd<double> {
  using Vec = float64x2_t;
  using Mask = uint64x2_t;
  static constexpr int kWidth = 2;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 3;
  static constexpr bool kLoadsParts = false;
  static constexpr bool kHalves = false;
  static constexpr bool kByLane = true;

  static SELFATTN_INLINE Vec load(const double* p) { return vld1q_f64(p); }
  static SELFATTN_INLINE void store(double* p, Vec v) { vst1q_f64(p, v); }
  static SELFATTN_INLINE Vec set(double x) { return vdupq_n_f64(x); }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return vaddq_f64(a, b); }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return vsubq_f64(a, b); }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return vmulq_f64(a, b); }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return vdivq_f64(a, b); }
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f64(c, a, b); }
  static SELFATTN_INLINE Vec fma_lane(Vec a, Vec b, int lane, Vec c) {
    return lane == 0 ? vfmaq_laneq_f64(c, a, b, 0) : vfmaq_laneq_f64(c, a, b, 1);
  }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return vabsq_f64(a); }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return vcltq_f64(a, b); }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return vceqq_f64(a, b); }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return vorrq_u64(a, b); }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) { return vbslq_f64(m, yes, no); }
  static SELFATTN_INLINE bool any(Mask m) { return vmaxvq_u32(vreinterpretq_u32_u64(m)) != 0; }
  static SELFATTN_INLINE Vec round(Vec a) { return vrndnq_f64(a); }
  // For integers n in [-1022, 1023].
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) {
    const int64x2_t exponent = vaddq_s64(vcvtq_s64_f64(n), vdupq_n_s64(1023));
    return vmulq_f64(a, vreinterpretq_f64_s64(vshlq_n_s64(exponent, 52)));
  }
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) { return vzip1q_f64(a, b); }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) { return vzip2q_f64(a, b); }

  // See Simd<float>.
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const double hidden = -std::numeric_limits<double>::infinity();
    const double bias[2] = {p[0] != 0 ? 0.0 : hidden, p[1] != 0 ? 0.0 : hidden};
    return load(bias);
  }
  using Words = uint64x2_t;
  static SELFATTN_INLINE Words words(uint32_t x) { return vdupq_n_u64(x); }
  static SELFATTN_INLINE Words words_from(uint32_t first) {
    return vaddq_u64(vcombine_u64(vcreate_u64(0), vcreate_u64(1)), vdupq_n_u64(first));
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {
    return vmull_u32(vmovn_u64(a), vdup_n_u32(b));
  }
  static SELFATTN_INLINE Words high_words(Words a) { return vshrq_n_u64(a, 32); }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    return veorq_u64(veorq_u64(a, b), vdupq_n_u64(c));
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    return vcltq_u64(vandq_u64(a, vdupq_n_u64(0xffffffff)), vdupq_n_u64(limit));
  }
};

}  // namespace selfattn::cpu::neon
