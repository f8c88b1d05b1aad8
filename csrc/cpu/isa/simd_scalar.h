// The portable instruction set: the compiler's own vectors of 128 bits, SSE2 on any x86-64. The interface is
// documented in docs/cpu-kernels.md, "The SIMD interface".
#pragma once

namespace selfattn::cpu::scalar {

template <class T>
struct Simd;
template <class T>
struct LowerHalf;  // there is none, see kHalves

template <class T, class Bits, int kLanes>
struct PortableSimd {
  typedef T Vec __attribute__((vector_size(16)));
  typedef Bits Mask __attribute__((vector_size(16)));
  typedef T Unaligned __attribute__((vector_size(16), aligned(alignof(T)), may_alias));
  static constexpr int kWidth = kLanes;
  static constexpr int kTileRows = 4;
  static constexpr int kTileVecs = 2;
  static constexpr bool kLoadsParts = false;
  static constexpr bool kHalves = false;
  static constexpr bool kByLane = false;

  static SELFATTN_INLINE Vec load(const T* p) { return *reinterpret_cast<const Unaligned*>(p); }
  static SELFATTN_INLINE void store(T* p, Vec v) { *reinterpret_cast<Unaligned*>(p) = v; }
  // Subtracts zeros, since 0 + (-0.0) would lose the sign.
  static SELFATTN_INLINE Vec set(T x) { return x - Vec{}; }
  static SELFATTN_INLINE Vec add(Vec a, Vec b) { return a + b; }
  static SELFATTN_INLINE Vec sub(Vec a, Vec b) { return a - b; }
  static SELFATTN_INLINE Vec mul(Vec a, Vec b) { return a * b; }
  static SELFATTN_INLINE Vec div(Vec a, Vec b) { return a / b; }
  // One rounding wherever the processor has such an instruction, so that all compilers give the same bits.
  static SELFATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < kLanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
  }
  static SELFATTN_INLINE Mask less(Vec a, Vec b) { return a < b; }
  static SELFATTN_INLINE Mask equal(Vec a, Vec b) { return a == b; }
  static SELFATTN_INLINE Mask either(Mask a, Mask b) { return a | b; }
  static SELFATTN_INLINE Vec select(Mask m, Vec yes, Vec no) {
    return (Vec)(((Mask)yes & m) | ((Mask)no & ~m));
  }
  static SELFATTN_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }
  static SELFATTN_INLINE Vec abs(Vec a) { return (Vec)((Mask)a & ~(Mask)set(T(-0.0))); }
  static SELFATTN_INLINE bool any(Mask m) {
    Bits bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= m[i];
    return bits != 0;
  }
  // Adding 1.5 * 2^(mantissa bits) rounds to the nearest integer and leaves it in the sum's low bits.
  static SELFATTN_INLINE Vec magic() { return set(sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0)); }
  static SELFATTN_INLINE Vec round(Vec a) { return (a + magic()) - magic(); }
  static SELFATTN_INLINE Vec mul_pow2(Vec a, Vec n) {
    constexpr int kBias = sizeof(T) == 4 ? 127 : 1023, kMantissa = sizeof(T) == 4 ? 23 : 52;
    return a * (Vec)(((Mask)(n + magic()) + kBias) << kMantissa);
  }

  // A 32-bit word per lane, in the low half of 64 bits; the high half is ignored.
  struct Words {
    uint64_t lane[kLanes];
  };
  static SELFATTN_INLINE Words words(uint32_t x) {
    Words r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = x;
    return r;
  }
  static SELFATTN_INLINE Words words_from(uint32_t first) {  // first + lane
    Words r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = first + static_cast<uint64_t>(i);
    return r;
  }
  static SELFATTN_INLINE Words multiply_words(Words a, uint32_t b) {  // all 64 bits of the product
    for (int i = 0; i < kLanes; ++i) a.lane[i] = static_cast<uint64_t>(static_cast<uint32_t>(a.lane[i])) * b;
    return a;
  }
  static SELFATTN_INLINE Words high_words(Words a) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] >>= 32;
    return a;
  }
  static SELFATTN_INLINE Words xor_words(Words a, Words b, uint32_t c) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] ^= b.lane[i] ^ c;
    return a;
  }
  static SELFATTN_INLINE Mask words_below(Words a, uint32_t limit) {
    Mask m;
    for (int i = 0; i < kLanes; ++i) m[i] = static_cast<uint32_t>(a.lane[i]) < limit ? -1 : 0;
    return m;
  }
};

template <>
struct Simd<float> : PortableSimd<float, int32_t, 4> {
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) { return Vec{a[0], b[0], a[1], b[1]}; }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) { return Vec{a[2], b[2], a[3], b[3]}; }

  static SELFATTN_INLINE Vec load_bfloat16(const uint16_t* p) {
    return (Vec)(Mask{p[0], p[1], p[2], p[3]} << 16);
  }
  static SELFATTN_INLINE void store_bfloat16(uint16_t* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) p[i] = bfloat16_from_float(v[i]);
  }
  // Does what float_from_float16 does, for all lanes at once.
  static SELFATTN_INLINE Vec load_float16(const uint16_t* p) {
    const Mask bits{p[0], p[1], p[2], p[3]}, magnitude = bits & 0x7fff, shifted = magnitude << 13;
    const Vec subnormal = __builtin_convertvector(magnitude, Vec) * 0x1p-24f;
    const Mask inf_or_nan = shifted | 0x7f800000, normal = shifted + (112 << 23);
    const Vec finite = select(magnitude < 0x400, subnormal, (Vec)normal);
    const Vec absolute = select(magnitude >= 0x7c00, (Vec)inf_or_nan, finite);
    return (Vec)((Mask)absolute | (bits & 0x8000) << 16);
  }
  static SELFATTN_INLINE void store_float16(uint16_t* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) p[i] = float16_from_float(v[i]);
  }
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const float hidden = -std::numeric_limits<float>::infinity();
    return Vec{p[0] ? 0.0f : hidden, p[1] ? 0.0f : hidden, p[2] ? 0.0f : hidden, p[3] ? 0.0f : hidden};
  }
};

template <>
struct Simd<double> : PortableSimd<double, int64_t, 2> {
  static SELFATTN_INLINE Vec interleave_low(Vec a, Vec b) { return Vec{a[0], b[0]}; }
  static SELFATTN_INLINE Vec interleave_high(Vec a, Vec b) { return Vec{a[1], b[1]}; }
  static SELFATTN_INLINE Vec load_bool_bias(const uint8_t* p) {
    const double hidden = -std::numeric_limits<double>::infinity();
    return Vec{p[0] ? 0.0 : hidden, p[1] ? 0.0 : hidden};
  }
};

}  // namespace selfattn::cpu::scalar
