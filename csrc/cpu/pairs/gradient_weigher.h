// The vector work of gradient_pipeline.h: makes weights and dS from scores and dP. It reads scores and dP as
// [key][lane] and stores what the products take, two keys a step, so that steps can stand between the
// instructions of an engine. The results have the bits of pair_gradients. As in pipeline_weigher.h, all that
// a step uses must stay in registers.
#pragma once

#include "pipeline_weigher.h"
#include "products_of_pairs.h"

#include "../fused/gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The places that the weights and dS of some keys are written to, as pairs.
struct PairedGradients {
  uint32_t *weight_rows, *grad_rows;  // [piece][key][pair of queries], as WeightOperand::rows
  uint32_t* grad_lanes;               // [pair of keys][piece][lane]
};

// kScaled: scores still lack a part of the scale.
template <int kPieces, bool kScaled>
class GradientWeigher {
 public:
  // Words from one key to the next, and from one piece to the next. With several pieces there are no panels.
  static constexpr int64_t kRow = (kPieces == 1 ? WeightOperand<Pairs>::kDepthOfRows : kLanes<Pairs>) / 2;
  static constexpr int64_t kRowPiece = kKeyBlock * kRow;

  SELFATTN_INLINE GradientWeigher() {
    __asm__("" : "+v"(one_), "+v"(least_), "+v"(to_power_));
    if constexpr (kPieces == 1) __asm__("" : "+v"(columns_));
    if constexpr (kPieces > 1) __asm__("" : "+v"(kept_));
    if constexpr (kPieces == 2) __asm__("" : "+v"(half_));
  }

  // Lanes past the last query get zeros, so that they add nothing.
  SELFATTN_INLINE void take_strip(const GradientStrip<Pairs>& strip) {
    scale_ = _mm512_set1_ps(strip.rest_of_scale);
    take_lanes<0>(strip);
    take_lanes<1>(strip);
  }
  SELFATTN_INLINE void begin(const float* scores, const float* grads, int64_t keys,
                             const PairedGradients& to) {
    scores_ = scores;
    grads_ = grads;
    end_ = scores + keys * kLd;
    to_ = to;
  }
  SELFATTN_INLINE bool more() const { return scores_ != end_; }
  SELFATTN_INLINE void step() {
    __m512 above_first, above_second, below_first, below_second;  // dS
    weigh(0, above_first, above_second);
    weigh(1, below_first, below_second);
    if constexpr (kPieces == 1) {
      store_gradients(above_first, above_second, below_first, below_second);
    } else {
      store_pieces_of_gradients<0>(above_first, above_second, below_first, below_second);
    }
    scores_ += 2 * kLd;
    grads_ += 2 * kLd;
    to_.weight_rows += 2 * kRow;
    to_.grad_rows += 2 * kRow;
    to_.grad_lanes += kPieces * kLd;
  }
  SELFATTN_INLINE void finish() {
    while (more()) step();
  }

 private:
  struct Lanes {
    __m512 max, inverse_sum, delta;
  };

  static constexpr int64_t kLd = kLanes<Pairs>;
  static constexpr int kTerms = kPieces + 3;  // exp_terms

  template <int kVec>
  SELFATTN_INLINE Lanes& lanes_of() {
    if constexpr (kVec == 0) return first_;
    return second_;
  }
  template <int kVec>
  SELFATTN_INLINE void take_lanes(const GradientStrip<Pairs>& strip) {
    const int64_t lane = kVec * 16;
    const __mmask16 valid = lanes_below(strip.count - lane);
    lanes_of<kVec>() = {_mm512_maskz_loadu_ps(valid, strip.row_max + lane),
                        _mm512_maskz_loadu_ps(valid, strip.inverse_sum + lane),
                        _mm512_maskz_loadu_ps(valid, strip.delta + lane)};
  }

  // Stores the weights of a key, and gives dS of both vectors.
  SELFATTN_INLINE void weigh(int64_t key, __m512& grad_first, __m512& grad_second) const {
    const float *scores = scores_ + key * kLd, *grads = grads_ + key * kLd;
    const __m512 first = gradient(scores, grads, first_, grad_first);
    const __m512 second = gradient(scores + 16, grads + 16, second_, grad_second);
    if constexpr (kPieces == 1) {
      _mm512_storeu_si512(to_.weight_rows + key * kRow, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    } else {
      store_pieces_of_weights<0>(to_.weight_rows + key * kRow, first, second);
    }
  }
  // Returns weight_of times the inverse sum; `result` is score_gradient. A weight of 0 has a dS of 0 whatever
  // dP is.
  SELFATTN_INLINE __m512 gradient(const float* score, const float* grad, const Lanes& lanes,
                                  __m512& result) const {
    __m512 s = _mm512_loadu_ps(score);
    if constexpr (kScaled) s = _mm512_mul_ps(s, scale_);
    const __m512 z = _mm512_mul_ps(_mm512_sub_ps(s, lanes.max), to_power_);
    const __m512 f = Simd<float>::fraction(z);
    const __mmask16 some = _mm512_cmp_ps_mask(z, least_, _CMP_NLT_UQ);
    const __m512 power = _mm512_maskz_scalef_ps(some, _mm512_fmadd_ps(terms_.at(f), f, one_), z);
    const __m512 weight = _mm512_mul_ps(power, lanes.inverse_sum);
    result = _mm512_maskz_mul_ps(some, weight, _mm512_sub_ps(_mm512_loadu_ps(grad), lanes.delta));
    return weight;
  }

  SELFATTN_INLINE void store_gradients(__m512 above_first, __m512 above_second, __m512 below_first,
                                       __m512 below_second) const {
    const __m512i first = (__m512i)_mm512_cvtne2ps_pbh(below_first, above_first);
    const __m512i second = (__m512i)_mm512_cvtne2ps_pbh(below_second, above_second);
    _mm512_storeu_si512(to_.grad_rows, _mm512_inserti64x4(first, _mm512_castsi512_si256(second), 1));
    _mm512_storeu_si512(to_.grad_rows + kRow, _mm512_shuffle_i64x2(first, second, 0xee));
    _mm512_storeu_si512(to_.grad_lanes, _mm512_permutexvar_epi16(columns_, first));
    _mm512_storeu_si512(to_.grad_lanes + 16, _mm512_permutexvar_epi16(columns_, second));
  }

  // Does what store_weight_pair does, from piece kPiece on.
  template <int kPiece>
  SELFATTN_INLINE void store_pieces_of_weights(uint32_t* to, __m512 first, __m512 second) const {
    if constexpr (kPiece < kPieces) {
      const __m512i one = bits_of<kPiece>(first), other = bits_of<kPiece>(second);
      _mm512_storeu_si512(to + kPiece * kRowPiece, join_.high_halves(one, other));
      store_pieces_of_weights<kPiece + 1>(to, rest_of(first, one), rest_of(second, other));
    }
  }
  // Does the same for dS, as pairs of queries and as pairs of keys.
  template <int kPiece>
  SELFATTN_INLINE void store_pieces_of_gradients(__m512 above_first, __m512 above_second, __m512 below_first,
                                                 __m512 below_second) const {
    if constexpr (kPiece < kPieces) {
      uint32_t *rows = to_.grad_rows + kPiece * kRowPiece, *lanes = to_.grad_lanes + kPiece * kLd;
      const __m512i a = bits_of<kPiece>(above_first), b = bits_of<kPiece>(above_second);
      const __m512i c = bits_of<kPiece>(below_first), d = bits_of<kPiece>(below_second);
      _mm512_storeu_si512(rows, join_.high_halves(a, b));
      _mm512_storeu_si512(rows + kRow, join_.high_halves(c, d));
      _mm512_storeu_si512(lanes, join_.high_halves(a, c));
      _mm512_storeu_si512(lanes + 16, join_.high_halves(b, d));
      store_pieces_of_gradients<kPiece + 1>(rest_of(above_first, a), rest_of(above_second, b),
                                            rest_of(below_first, c), rest_of(below_second, d));
    }
  }
  // The next piece, in the high half; the last of two pieces is rounded.
  template <int kPiece>
  SELFATTN_INLINE __m512i bits_of(__m512 x) const {
    const __m512i bits = _mm512_castps_si512(x);
    return kPieces == 2 && kPiece == 1 ? _mm512_add_epi32(bits, half_) : bits;
  }
  SELFATTN_INLINE __m512 rest_of(__m512 x, __m512i bits) const {
    return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(bits, kept_)));
  }

  const float *scores_ = nullptr, *grads_ = nullptr, *end_ = nullptr;
  PairedGradients to_{};
  Lanes first_, second_;
  __m512 scale_;
  PowerTerms<kTerms> terms_;
  __m512 one_ = _mm512_set1_ps(1.0f), least_ = _mm512_set1_ps(-80.0f);
  __m512 to_power_ = _mm512_set1_ps(static_cast<float>(kLog2E));
  // See interleave_halves.
  __m512i columns_ = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                      6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  PairJoin join_;
  __m512i kept_ = _mm512_set1_epi32(-65536), half_ = _mm512_set1_epi32(0x8000);
};

}  // namespace selfattn::cpu::SELFATTN_ISA
