// Turns scores and dP into weights and dS in pairs, in one pass over registers. It serves calls where nothing
// comes in between.
#pragma once

#include "../fused/gradient_strip.h"
#include "weights_of_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The numbers of a vector of queries that turn a block of theirs into pairs.
template <Weigh kWeigh>
struct PairedLanes {
  Normaliser<float, kWeigh> weigh;
  __m512 delta;
  __mmask16 valid;  // lanes past the last query meet rows of zeros, and must be finite for that to give 0

  SELFATTN_INLINE PairedLanes(const GradientStrip<Pairs>& strip, float factor, int64_t lane, __mmask16 lanes)
      : weigh(strip.row_max + lane, strip.inverse_sum + lane, factor),
        delta(_mm512_loadu_ps(strip.delta + lane)),
        valid(lanes) {}
};

// Pairs the rows of 32 queries from `lane` on, or of the strip's last 16 with zeros as the second half.
template <Weigh kWeigh, int kVecs>
void pair_gradient_lanes(const GradientStrip<Pairs>& strip, int64_t keys, float factor, int64_t first,
                         int64_t lane, const GradientScratch<Pairs>& scratch) {
  constexpr int64_t ld = kLanes<Pairs>;
  constexpr int kLast = kVecs - 1;
  const PairedLanes<kWeigh> lanes[2] = {
      {strip, factor, lane, lanes_below(strip.count - lane)},
      {strip, factor, lane + kLast * 16, lanes_below(strip.count - lane - kLast * 16)}};
  const float* scores = scratch.weights.block + lane;
  const float* grads = scratch.grad.block + lane;
  for (int64_t j = 0; j < keys; j += 2) {
    const bool has_next = j + 1 < keys;
    __m512 weight[2][2], grad[2][2];  // [key][vector]
    SELFATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
      weight[i][1] = grad[i][1] = _mm512_setzero_ps();
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = (i == 1 && has_next ? j + 1 : j) * ld + v * 16;
        const __mmask16 valid = i == 0 || has_next ? lanes[v].valid : __mmask16(0);
        weight[i][v] = _mm512_maskz_mov_ps(valid, lanes[v].weigh(_mm512_loadu_ps(scores + at)));
        grad[i][v] = score_gradient<float>(weight[i][v], _mm512_loadu_ps(grads + at), lanes[v].delta);
      }
    }
    uint32_t* weight_rows = scratch.weights.row_pairs(j, first + lane);
    uint32_t* grad_rows = scratch.grad.row_pairs(j, first + lane);
    const int64_t row = scratch.weights.depth_of_rows / 2;
    constexpr int kPieces = pieces_of(kWeigh);
    if constexpr (kPieces > 1) {
      uint32_t* to = scratch.grad.lane_pieces(j / 2, kPieces) + lane;
      for (int v = 0; v < kVecs; ++v) {
        store_weight_pair<kPieces>(to + v * 16, ld, grad[0][v], grad[1][v]);
      }
      const int64_t stride = scratch.weights.row_pieces;
      for (int i = 0; i < (has_next ? 2 : 1); ++i) {
        store_weight_pair<kPieces>(weight_rows + i * row, stride, weight[i][0], weight[i][1]);
        store_weight_pair<kPieces>(grad_rows + i * row, stride, grad[i][0], grad[i][1]);
      }
      continue;
    }
    __m512i both[2];  // one vector of queries each, of both keys
    SELFATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(weight[i][1], weight[i][0]);
      if (i == 0 || has_next) _mm512_storeu_si512(weight_rows + i * row, bits);
      both[i] = (__m512i)_mm512_cvtne2ps_pbh(grad[1][i], grad[0][i]);
    }
    _mm512_storeu_si512(grad_rows, _mm512_inserti64x4(both[0], _mm512_castsi512_si256(both[1]), 1));
    if (has_next) _mm512_storeu_si512(grad_rows + row, _mm512_shuffle_i64x2(both[0], both[1], 0xee));
    uint32_t* to = scratch.grad.lanes + j / 2 * ld + lane;
    _mm512_storeu_si512(to, interleave_halves(both[0]));
    if (kVecs == 2) _mm512_storeu_si512(to + 16, interleave_halves(both[1]));
  }
}

template <>
inline void pair_gradients<Pairs>(const AttentionParams& p, const GradientStrip<Pairs>& strip, int64_t keys,
                                  float factor, const PairedPlace& place, GradientScratch<Pairs>& scratch) {
  with_weighing<Pairs>(p, factor, [&](auto weigh) {
    for (int64_t lane = 0; lane < strip.vecs * 16; lane += 32) {
      if (strip.vecs * 16 - lane > 16) {
        pair_gradient_lanes<weigh.kind, 2>(strip, keys, factor, place.first_query, lane, scratch);
      } else {
        pair_gradient_lanes<weigh.kind, 1>(strip, keys, factor, place.first_query, lane, scratch);
      }
    }
  });
  scratch.weights.pad_rows(keys, place.first_query, strip.count, place.rows);
  scratch.grad.pad_rows(keys, place.first_query, strip.count, place.rows);
  scratch.grad.pad_lanes(keys, strip.vecs, 2);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
