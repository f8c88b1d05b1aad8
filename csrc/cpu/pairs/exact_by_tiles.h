// Products with weights in ExactPairs, by tiles. Weights are three pieces, which hold all bits of a float,
// and meet inputs of one piece in three products. At 16 times the rate of a multiply-add, this is exact and
// still faster.
#pragma once

#include "exact_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <>
struct ColumnOperand<ExactPairs> : ColumnOperand<Pairs> {};

template <>
struct VectorOperand<ExactPairs> : VectorOperand<Pairs> {};

template <>
struct WeightOperand<ExactPairs> : WeightOperand<float> {
  static constexpr int64_t kRowPairs = round_up(kLanes<float>, kDepthStep) / 2;
  static constexpr int64_t kLaneWords = kKeyBlock / 2 * kMaxPieces * kLanes<float>;
  static constexpr int64_t kRowPiece = kKeyBlock * kRowPairs;

  uint32_t* lanes;  // [pair of keys][piece][kLanes]
  uint32_t* rows;   // [piece][key][pair of queries]

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    WeightOperand<float>::allocate(p, arena);
    lanes = arena.take<uint32_t>(kLaneWords);
    rows = arena.take<uint32_t>(kMaxPieces * kRowPiece);
  }
  void ready_as_lanes(int64_t keys, int64_t vecs) {
    constexpr int64_t ld = kLanes<float>;
    for (int64_t pair = 0; pair < product_pairs(keys); ++pair) {
      for (int64_t lane = 0; lane < vecs * 16; lane += 16) {
        const float* from = block + 2 * pair * ld + lane;
        const __m512 above = 2 * pair < keys ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
        const __m512 below = 2 * pair + 1 < keys ? _mm512_loadu_ps(from + ld) : _mm512_setzero_ps();
        store_weight_pair<kMaxPieces>(lanes + pair * kMaxPieces * ld + lane, ld, above, below);
      }
    }
  }
  // Pairs are neighbours, like those of VectorOperand<Pairs> with one piece.
  void ready_as_rows(int64_t keys, int64_t /*first*/, int64_t queries, int64_t /*rows*/) {
    for (int64_t key = 0; key < padded_rows(keys); ++key) {
      for (int64_t lane = 0; lane < padded_depth(queries); lane += 32) {
        // Lanes past the last query meet rows of zeros, and must be finite for that to give 0.
        Numbers x{_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (key < keys) x = load_32(block + key * kLanes<float> + lane, DType::kFloat32, 0, queries - lane);
        uint32_t* to = rows + key * kRowPairs + lane / 2;
        for (int piece = 0; piece < kMaxPieces; ++piece) {
          _mm512_storeu_si512(to + piece * kRowPiece, take_piece(x));
        }
      }
    }
  }
};

// Small products are added first.
template <>
inline void multiply_columns<ExactPairs>(const ColumnOperand<ExactPairs>& a, int64_t from, int64_t keys,
                                         int64_t columns, const WeightOperand<ExactPairs>& w, int64_t lanes,
                                         const ColumnSums<float>& c, const float* visible) {
  const int64_t vecs = divide_up(lanes, Simd<float>::kWidth);
  ColumnSums<float> sums = c;
  for (int piece = kMaxPieces - 1; piece >= 0; --piece) {
    multiply_column_pieces(a, from, keys, columns, w.lanes + piece * kLanes<float>, kMaxPieces, vecs, sums);
    sums.update = Update::kAdd;
  }
  add_special_columns(a, from, keys, columns, w.block, nullptr, vecs, c.data, visible);
}

template <>
inline void multiply_weights<ExactPairs>(const WeightOperand<ExactPairs>& w, int64_t keys, int64_t first,
                                         int64_t queries, const VectorOperand<ExactPairs>& b, int64_t columns,
                                         float* c, const float* visible) {
  for (int piece = kMaxPieces - 1; piece >= 0; --piece) {
    multiply_weight_pieces(w.rows + piece * w.kRowPiece, w.kRowPairs, 0, keys, first, queries, b, columns, c);
  }
  add_special_vectors(w.block, keys, first, queries, b, columns, c, visible);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
