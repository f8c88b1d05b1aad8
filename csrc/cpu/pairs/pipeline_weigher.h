// The vector work of pipeline.h: makes weights in pairs of keys from scores [key][lane]. A step takes two
// keys, so that steps can stand between the instructions of an engine.
//
// All that a step uses must stay in registers. Compilers keep members in registers, but elements of an array
// in memory; they load known constants again in every step, and put off additions, with the weights of many
// steps in memory. So everything is a member of its own, and assembler statements without instructions hide
// values from the compiler.
#pragma once

#include "operands_of_pairs.h"

#include "../fused/forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// q(f) of PowerPolynomial, from term kFirst on.
template <int kTerms, int kFirst = 0>
struct PowerTerms {
  __m512 coefficient = _mm512_set1_ps(PowerPolynomial<kTerms>::kCoefficients[kFirst]);
  PowerTerms<kTerms, kFirst + 1> higher;

  SELFATTN_INLINE PowerTerms() { __asm__("" : "+v"(coefficient)); }
  SELFATTN_INLINE __m512 at(__m512 f) const { return _mm512_fmadd_ps(higher.at(f), f, coefficient); }
};
template <int kTerms>
struct PowerTerms<kTerms, kTerms - 1> {
  __m512 coefficient = _mm512_set1_ps(PowerPolynomial<kTerms>::kCoefficients[kTerms - 1]);

  SELFATTN_INLINE PowerTerms() { __asm__("" : "+v"(coefficient)); }
  SELFATTN_INLINE __m512 at(__m512) const { return coefficient; }
};

// high_halves by a shuffle of bytes, which has a port of its own; a shift would take one that multiplications
// need.
class PairJoin {
 public:
  SELFATTN_INLINE PairJoin() {
    const int64_t two = 0x0706070603020302, next_two = 0x0f0e0f0e0b0a0b0a;
    halves_ = _mm512_setr_epi64(two, next_two, two, next_two, two, next_two, two, next_two);
    __asm__("" : "+v"(halves_), "+Yk"(low_halves_));
  }
  SELFATTN_INLINE __m512i high_halves(__m512i above, __m512i below) const {
    return _mm512_mask_shuffle_epi8(below, low_halves_, above, halves_);
  }

 private:
  __m512i halves_;
  __mmask64 low_halves_ = 0x3333333333333333;
};

// A single piece of a weight is cut off, not rounded. The output is divided by the sum of the weights that
// met the values, so what all of them lose cancels, and the rest is no larger than that of rounding.
template <int kPieces>
class PipelineWeigher {
 public:
  uint32_t* pairs = nullptr;  // where the next step stores, [pair][piece][lane]

  SELFATTN_INLINE PipelineWeigher() { __asm__("" : "+v"(one_), "+v"(least_), "+v"(to_power_), "+v"(kept_)); }

  // Whether the product of one of 16 maxima and log2(e) is rounded by more than take_shift mends. That of an
  // infinite maximum is exact.
  static SELFATTN_INLINE bool is_large(__m512 max) {
    constexpr float kMost = 1 << 20, kInfinity = std::numeric_limits<float>::infinity();
    const __m512 magnitude = _mm512_abs_ps(max);
    return kPieces == 1 && (_mm512_cmp_ps_mask(_mm512_set1_ps(kMost), magnitude, _CMP_LT_OQ) &
                            _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(kInfinity), _CMP_LT_OQ)) != 0;
  }
  // Takes the maxima of 16 rows, which are finite, or 0 where everything is hidden so far.
  template <int kVec>
  SELFATTN_INLINE void take_shift(__m512 max, __m512 scale) {
    Lanes& lanes = lanes_of<kVec>();
    if constexpr (kPieces > 1) {
      scale_ = scale;
      lanes.shift = max;
    } else {
      scale_ = _mm512_mul_ps(scale, to_power_);
      lanes.shift = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(max, to_power_));
      // Rounding max * log2(e) multiplies all weights of a row by 2^rest, but row_sum must be that of weights
      // that are 1 at the maximum. 2^-rest is computed by its series, as rest is a rounding error.
      const __m512 rest = _mm512_fmadd_ps(_mm512_div_ps(max, scale), scale_, lanes.shift);
      const __m512 x = _mm512_mul_ps(rest, _mm512_set1_ps(-kLn2));
      lanes.unit = _mm512_fmadd_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(0.5f), one_), x, one_);
    }
  }

  SELFATTN_INLINE void begin(const float* from, int64_t keys, uint32_t* to) {
    scores_ = from;
    end_ = from + keys * kLd;
    pairs = to;
  }
  SELFATTN_INLINE bool more() const { return scores_ != end_; }
  SELFATTN_INLINE void step() {
    weigh<0>();
    weigh<1>();
    scores_ += 2 * kLd;
    pairs += kPieces * kLd;
  }
  // Weighs all scores that lie before `to`.
  SELFATTN_INLINE void reach(const float* to) {
    while (scores_ < to) step();
  }
  SELFATTN_INLINE void finish() { reach(end_); }

  SELFATTN_INLINE void clear() {
    first_.above = first_.below = first_.used = _mm512_setzero_ps();
    second_.above = second_.below = second_.used = _mm512_setzero_ps();
  }
  // The lanes whose sum since clear() says that their maximum has to move, one bit each.
  SELFATTN_INLINE uint32_t lanes_too_high() const {
    const __m512 most = _mm512_set1_ps(kMostBlockSum);
    const uint32_t first = _mm512_cmp_ps_mask(most, sum_of(first_), _CMP_LT_OQ);
    const uint32_t second = _mm512_cmp_ps_mask(most, sum_of(second_), _CMP_LT_OQ);
    return first | second << 16;
  }
  // Adds the sums since clear() to the strip's.
  SELFATTN_INLINE void add_sums(const ForwardStrip<Pairs>& strip) const {
    add_to(strip, 0, sum_of(first_), first_);
    add_to(strip, 16, sum_of(second_), second_);
  }

 private:
  struct Lanes {
    __m512 shift;         // the maximum; with one piece, minus the maximum times log2(e)
    __m512 unit;          // with one piece: the factor that makes the weight of the maximum 1
    __m512 above, below;  // sums of the weights of even and odd keys
    __m512 used;          // sum of the weights that meet the values, where they are cut off
  };

  static constexpr int64_t kLd = kLanes<Pairs>;
  static constexpr int kTerms = kPieces + 3;  // exp_terms
  static constexpr float kLn2 = 0.69314718f;

  static SELFATTN_INLINE __m512 sum_of(const Lanes& lanes) { return _mm512_add_ps(lanes.above, lanes.below); }
  template <int kVec>
  SELFATTN_INLINE Lanes& lanes_of() {
    if constexpr (kVec == 0) return first_;
    return second_;
  }

  template <int kVec>
  SELFATTN_INLINE void weigh() {
    Lanes& lanes = lanes_of<kVec>();
    const float* from = scores_ + 16 * kVec;
    uint32_t* to = pairs + 16 * kVec;
    const __m512 above = power(exponent(from, lanes.shift));
    const __m512 below = power(exponent(from + kLd, lanes.shift));
    lanes.above = _mm512_add_ps(lanes.above, above);
    lanes.below = _mm512_add_ps(lanes.below, below);
    if constexpr (kPieces == 1) {
      lanes.used = _mm512_add_ps(lanes.used, _mm512_add_ps(cut_off(above), cut_off(below)));
      _mm512_storeu_si512(to, join_.high_halves(_mm512_castps_si512(above), _mm512_castps_si512(below)));
      __asm__ volatile("" : "+v"(lanes.above), "+v"(lanes.below), "+v"(lanes.used));
    } else {
      store_weight_pair<kPieces>(to, kLd, above, below);
      __asm__ volatile("" : "+v"(lanes.above), "+v"(lanes.below));
    }
  }
  // With one piece, this takes one instruction. With several, whose products take longer, it gives the bits
  // of weight_of.
  SELFATTN_INLINE __m512 exponent(const float* score, __m512 shift) const {
    const __m512 s = _mm512_loadu_ps(score);
    if constexpr (kPieces == 1) return _mm512_fmadd_ps(s, scale_, shift);
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_mul_ps(s, scale_), shift), to_power_);
  }
  SELFATTN_INLINE __m512 power(__m512 z) const {  // exp2_nonpositive
    const __m512 f = Simd<float>::fraction(z);
    return Simd<float>::mul_pow2_floor_above(_mm512_fmadd_ps(terms_.at(f), f, one_), z, least_);
  }
  SELFATTN_INLINE __m512 cut_off(__m512 x) const {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), kept_));
  }
  static SELFATTN_INLINE void add_to(const ForwardStrip<Pairs>& strip, int64_t lane, __m512 all,
                                     const Lanes& lanes) {
    float *sum = strip.row_sum + lane, *used = strip.used_sum + lane;
    if constexpr (kPieces > 1) {
      _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), all));
    } else {
      _mm512_storeu_ps(sum, _mm512_fmadd_ps(all, lanes.unit, _mm512_loadu_ps(sum)));
      _mm512_storeu_ps(used, _mm512_add_ps(_mm512_loadu_ps(used), lanes.used));
    }
  }

  const float *scores_ = nullptr, *end_ = nullptr;
  Lanes first_, second_;
  __m512 scale_;  // of scores; with one piece, times log2(e)
  PowerTerms<kTerms> terms_;
  __m512 one_ = _mm512_set1_ps(1.0f), least_ = _mm512_set1_ps(-80.0f);
  __m512 to_power_ = _mm512_set1_ps(static_cast<float>(kLog2E));
  __m512i kept_ = _mm512_set1_epi32(-65536);
  PairJoin join_;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
