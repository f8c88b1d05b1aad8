// The vectors' part of pipeline.h: from scores [key][lane] to weights in pairs of keys, two keys a step, so
// that steps can stand between the instructions of an engine.
#pragma once

#include "pack.h"

#include "../algorithm/forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// What stands beside a product that has nothing beside it.
struct NoWork {
  SELFATTN_INLINE bool more() const { return false; }
  SELFATTN_INLINE void step() {}
};

// A single piece of a weight is cut off, not rounded: what divides the output is the sum of the weights that
// met the values, so that what all of them lose cancels, and the rest is no larger than that of rounding.
template <int kPieces>
class PipelineWeigher {
 public:
  uint32_t* pairs = nullptr;  // of the next step, [pair][piece][lane]

  PipelineWeigher() {
    terms_[0] = _mm512_set1_ps(1.0f);
    for (int i = 0; i < kTerms; ++i) {
      terms_[i + 1] = _mm512_set1_ps(PowerPolynomial<kTerms>::kCoefficients[i]);
    }
    least_ = _mm512_set1_ps(-80.0f);
    to_power_ = _mm512_set1_ps(kToPowers);
    kept_ = _mm512_set1_epi32(-65536);
    const int64_t two = 0x0706070603020302, next_two = 0x0f0e0f0e0b0a0b0a;
    halves_ = _mm512_setr_epi64(two, next_two, two, next_two, two, next_two, two, next_two);
    low_halves_ = 0x3333333333333333;
    // Compilers that know constants to be constants load them again in every step.
    for (int i = 0; i <= kTerms; ++i) hide(terms_[i]);
    hide(least_);
    hide(to_power_);
    __asm__("" : "+v"(kept_), "+v"(halves_), "+Yk"(low_halves_));
  }

  // The maxima of 16 rows: finite, or 0 where everything is hidden so far.
  void take_shift(int vec, __m512 max, __m512 scale) {
    if constexpr (kPieces > 1) {
      scale_ = scale;
      shift_[vec] = max;
    } else {
      scale_ = _mm512_mul_ps(scale, _mm512_set1_ps(kToPowers));
      shift_[vec] = _mm512_mul_ps(max, _mm512_set1_ps(-kToPowers));
      // Rounding max * log2(e) multiplies all weights of a row by 2^rest: row_sum is to be that of weights
      // that are 1 at the maximum. 2^-rest by its series, as rest is a rounding error.
      const __m512 rest = _mm512_fmadd_ps(_mm512_div_ps(max, scale), scale_, shift_[vec]);
      const __m512 x = _mm512_mul_ps(rest, _mm512_set1_ps(-kFromPowers)), one = _mm512_set1_ps(1.0f);
      unit_[vec] = _mm512_fmadd_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(0.5f), one), x, one);
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
  // All but the last keys.
  SELFATTN_INLINE void leave(int64_t keys) {
    while (end_ - scores_ > keys * kLd) step();
  }
  SELFATTN_INLINE void finish() { leave(0); }

  SELFATTN_INLINE void clear() {
    for (int vec = 0; vec < 2; ++vec) all_[vec][0] = all_[vec][1] = used_[vec] = _mm512_setzero_ps();
  }
  // Adds the sums since clear() to the strip's, if the weights may stay: false if a maximum has to move.
  bool add_sums(const ForwardStrip<Pairs>& strip) const {
    __m512 all[2];
    __mmask16 higher = 0;
    for (int vec = 0; vec < 2; ++vec) {
      all[vec] = _mm512_add_ps(all_[vec][0], all_[vec][1]);
      higher |= _mm512_cmp_ps_mask(_mm512_set1_ps(kMostBlockSum), all[vec], _CMP_LT_OQ);
    }
    if (higher != 0) return false;
    for (int vec = 0; vec < 2; ++vec) {
      float *sum = strip.row_sum + 16 * vec, *used = strip.used_sum + 16 * vec;
      if constexpr (kPieces > 1) {
        _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), all[vec]));
      } else {
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(all[vec], unit_[vec], _mm512_loadu_ps(sum)));
        _mm512_storeu_ps(used, _mm512_add_ps(_mm512_loadu_ps(used), used_[vec]));
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kLd = kLanes<Pairs>;
  static constexpr int kTerms = kPieces + 3;  // exp_terms
  static constexpr float kToPowers = static_cast<float>(kLog2E), kFromPowers = 0.69314718f;

  template <int kVec>
  SELFATTN_INLINE void weigh() {
    const float* from = scores_ + 16 * kVec;
    uint32_t* to = pairs + 16 * kVec;
    const __m512 above = power(exponent<kVec>(from)), below = power(exponent<kVec>(from + kLd));
    all_[kVec][0] = _mm512_add_ps(all_[kVec][0], above);
    all_[kVec][1] = _mm512_add_ps(all_[kVec][1], below);
    if constexpr (kPieces == 1) {
      used_[kVec] = _mm512_add_ps(used_[kVec], _mm512_add_ps(cut_off(above), cut_off(below)));
      // The high halves, by a shuffle of bytes: it has a port of its own beside multiplications, which a
      // shift takes theirs from.
      _mm512_storeu_si512(to, _mm512_mask_shuffle_epi8(_mm512_castps_si512(below), low_halves_,
                                                       _mm512_castps_si512(above), halves_));
    } else {
      store_weight_pair<kPieces>(to, kLd, above, below);
    }
    // Compilers would put the additions off, and keep the weights of many steps in memory.
    __asm__ volatile("" : "+v"(all_[kVec][0]), "+v"(all_[kVec][1]), "+v"(used_[kVec]));
  }
  // One piece: in one instruction. Several, whose products take longer: to the bit what weight_of makes of
  // it.
  template <int kVec>
  SELFATTN_INLINE __m512 exponent(const float* score) const {
    const __m512 s = _mm512_loadu_ps(score);
    if constexpr (kPieces == 1) return _mm512_fmadd_ps(s, scale_, shift_[kVec]);
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_mul_ps(s, scale_), shift_[kVec]), to_power_);
  }
  SELFATTN_INLINE __m512 power(__m512 z) const {  // exp2_nonpositive
    const __m512 f = Simd<float>::fraction(z);
    __m512 q = terms_[kTerms];
    SELFATTN_UNROLL
    for (int i = kTerms - 1; i >= 0; --i) q = _mm512_fmadd_ps(q, f, terms_[i]);
    return Simd<float>::mul_pow2_floor_above(q, z, least_);
  }
  SELFATTN_INLINE __m512 cut_off(__m512 x) const {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), kept_));
  }
  static void hide(__m512& constant) { __asm__("" : "+v"(constant)); }

  const float *scores_ = nullptr, *end_ = nullptr;
  __m512 scale_;      // of scores; of one piece, for powers of two
  __m512 shift_[2];   // the maximum; of one piece, minus it for powers of two
  __m512 unit_[2];    // what the weight of the maximum is divided by; of one piece
  __m512 all_[2][2];  // sums of the weights of even and odd keys
  __m512 used_[2];    // of those that meet the values, where they are cut off
  __m512 terms_[kTerms + 1], least_, to_power_;
  __m512i kept_, halves_;
  __mmask64 low_halves_;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
