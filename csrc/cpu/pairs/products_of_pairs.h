// The products of operands.h for P = Pairs. The engine multiplies the pieces; then special rows are added in
// float.
#pragma once

#include "../fused/delta.h"
#include "weights_of_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Replaces the scores of special queries and keys, which have no pieces, by scores in float, in the padding
// of vectors, too: every later step passes over it.
inline void replace_special_scores(const RowOperand<Pairs>& a, int64_t from, int64_t rows,
                                   LaneOperand<Pairs>& b, int64_t columns, int64_t lanes, float* c) {
  constexpr int64_t ld = kLanes<Pairs>;
  if (!b.special && !a.special(from, rows)) return;
  const Rows<float> floats = rows_as<float>(a.source.from(from, rows), false, a.float_buffer);
  multiply<float, false>(
      {columns, floats.data, floats.stride, b.as_float().data, ld, a.block, ld, Update::kStore, nullptr},
      rows, lanes);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t lane = 0; lane < round_up_to_vector<float>(lanes); ++lane) {
      if (a.is_special[from + row] || b.is_special[lane] != 0.0f)
        c[row * ld + lane] = a.block[row * ld + lane];
    }
  }
}

// c = a * b, or c += a * b, from the pieces alone, for `vecs` vectors of lanes from `lane` on.
inline void multiply_pieces(const RowOperand<Pairs>& a, int64_t from, int64_t rows,
                            const LaneOperand<Pairs>& b, int64_t lane, int64_t columns, int64_t vecs,
                            float* c, Update update = Update::kStore) {
  constexpr int64_t ld = kLanes<Pairs>;
  PairProduct product;
  product.pieces = a.pieces;
  product.order = a.order;
  product.pairs = product_pairs(columns);
  product.a = a.data + from * a.row_stride;
  product.a_row = a.row_stride;
  product.a_piece = a.piece_stride;
  product.b = b.data + lane;
  product.b_pair = ld;
  product.b_piece = b.piece_stride;
  product.c = c;
  product.ldc = ld;
  product.update = update;
  PairEngine::multiply(product, rows, vecs);
}

// Update::kAdd is for one piece only, which has no special rows.
template <>
inline void multiply_lanes<Pairs>(const RowOperand<Pairs>& a, int64_t from, int64_t rows,
                                  LaneOperand<Pairs>& b, int64_t columns, int64_t lanes, float* c,
                                  Update update) {
  multiply_pieces(a, from, rows, b, 0, columns, divide_up(lanes, Simd<float>::kWidth), c, update);
  if (update == Update::kStore) replace_special_scores(a, from, rows, b, columns, lanes, c);
}

// Updates c by a * w, from the pieces alone. `w` has `pieces` pieces for each pair of keys.
inline void multiply_column_pieces(const ColumnOperand<Pairs>& a, int64_t from, int64_t keys, int64_t columns,
                                   const uint32_t* w, int64_t pieces, int64_t vecs,
                                   const ColumnSums<float>& c) {
  constexpr int64_t ld = kLanes<Pairs>;
  PairProduct product;
  product.pieces = product.order = a.pieces;
  product.pairs = product_pairs(keys);
  product.a = a.data + from / kKeyBlock * a.block_stride;
  product.a_row = a.row_stride;
  product.a_pair = a.pair_stride;
  product.a_piece = a.piece_stride;
  product.b = w;
  product.b_pair = pieces * ld;
  product.b_piece = ld;
  product.c = c.data;
  product.ldc = ld;
  product.update = c.update;
  product.lane_scale = c.lane_scale;
  PairEngine::multiply(product, columns, vecs);
}

// Adds the products of special rows, and of all rows in the lanes that `in_float` marks (nullable; 1 or 0
// each), with the block of weights.
inline void add_special_columns(const ColumnOperand<Pairs>& a, int64_t from, int64_t keys, int64_t columns,
                                const float* block, const float* in_float, int64_t vecs, float* c,
                                const float* visible) {
  constexpr int64_t ld = kLanes<Pairs>;
  if (in_float == nullptr && !a.special(from, keys)) return;
  const SpecialRows& s = a.specials;
  int64_t count = 0;
  for (int64_t key = 0; key < keys; ++key) {
    const bool special = s.marks[from + key];
    if (in_float == nullptr && !special) continue;
    s.convert(from + key, count);
    memcpy(s.weights + count * ld, block + key * ld, static_cast<size_t>(ld) * sizeof(float));
    memcpy(s.visible + count * ld, visible + key * ld, static_cast<size_t>(ld) * sizeof(float));
    for (int64_t lane = 0; !special && lane < ld; ++lane) s.visible[count * ld + lane] *= in_float[lane];
    ++count;
  }
  multiply_visible<float, true>(
      {count, s.values, round_up_to_vector<float>(columns), s.weights, ld, c, ld, Update::kAdd, nullptr},
      columns, vecs, s.visible, ld);
}

template <>
inline void multiply_columns<Pairs>(const ColumnOperand<Pairs>& a, int64_t from, int64_t keys,
                                    int64_t columns, const WeightOperand<Pairs>& w, int64_t lanes,
                                    const ColumnSums<float>& c, const float* visible) {
  const int64_t vecs = divide_up(lanes, Simd<float>::kWidth);
  multiply_column_pieces(a, from, keys, columns, w.lanes, w.pieces, vecs, c);
  add_special_columns(a, from, keys, columns, w.block, w.in_float, vecs, c.data, visible);
}

// c += w * b, from the pieces alone. Rows of `w` are `row` words apart, pieces `piece` words.
inline void multiply_weight_pieces(const uint32_t* w, int64_t row, int64_t piece, int64_t keys, int64_t first,
                                   int64_t queries, const VectorOperand<Pairs>& b, int64_t columns,
                                   float* c) {
  const int64_t padded = round_up_to_vector<float>(columns);
  PairProduct product;
  product.pieces = product.order = b.pieces;
  product.pairs = product_pairs(queries);
  product.a = w;
  product.a_row = row;
  product.a_piece = piece;
  product.b = b.data + first / 2 * b.pair_stride;
  product.b_pair = b.pair_stride;
  product.b_piece = b.piece_stride;
  product.c = c;
  product.ldc = padded;
  product.update = Update::kAdd;
  PairEngine::multiply(product, keys, padded / 16);
}

// Adds the products of special rows with the block of weights.
inline void add_special_vectors(const float* block, int64_t keys, int64_t first, int64_t queries,
                                const VectorOperand<Pairs>& b, int64_t columns, float* c,
                                const float* visible) {
  constexpr int64_t ld = kLanes<Pairs>;
  const int64_t padded = round_up_to_vector<float>(columns);
  if (!b.special()) return;
  const SpecialRows& s = b.specials;
  int64_t count = 0;
  for (int64_t query = 0; query < queries; ++query) {
    if (!s.marks[first + query]) continue;
    s.convert(first + query, count);
    for (int64_t key = 0; key < keys; ++key) {
      s.weights[key * ld + count] = block[key * ld + query];
      s.visible[key * ld + count] = visible[key * ld + query];
    }
    ++count;
  }
  multiply_visible<float, false>({count, s.weights, ld, s.values, padded, c, padded, Update::kAdd, nullptr},
                                 keys, padded / 16, s.visible, ld);
}

template <>
inline void multiply_weights<Pairs>(const WeightOperand<Pairs>& w, int64_t keys, int64_t first,
                                    int64_t queries, const VectorOperand<Pairs>& b, int64_t columns, float* c,
                                    const float* visible) {
  multiply_weight_pieces(w.row_pairs(0, first), w.depth_of_rows / 2, w.row_pieces, keys, first, queries, b,
                         columns, c);
  add_special_vectors(w.block, keys, first, queries, b, columns, c, visible);
}

// Computes delta by the same products as dP: the diagonal of O dO^T, 16 rows and lanes at a time.
template <>
struct Delta<Pairs> {
  RowOperand<Pairs> out, residual;
  float* product;     // [16][kLanes]
  float* is_special;  // [kLanes] 1 where the row of the output or of its gradient is special, else 0
  bool any_special;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    out.allocate(p, kLanes<Pairs>, p.value_dim, arena);
    residual.allocate(p, kLanes<Pairs>, p.value_dim, arena);
    product = arena.take<float>(16 * kLanes<Pairs>);
    is_special = arena.take<float>(kLanes<Pairs>);
  }
  void compute(const RowSource& out_rows, const RowSource& residual_rows, LaneOperand<Pairs>& grad_out,
               int64_t vecs, float* delta) {
    memset(delta, 0, static_cast<size_t>(vecs * 16) * sizeof(float));
    add(out, out_rows, grad_out, vecs, delta);
    any_special = grad_out.special || out.special(0, out_rows.rows);
    for (int64_t lane = 0; any_special && lane < kLanes<Pairs>; ++lane) {
      const bool found = lane < out_rows.rows && (out.is_special[lane] || grad_out.is_special[lane] != 0.0f);
      is_special[lane] = found ? 1.0f : 0.0f;
    }
    if (residual_rows.data != nullptr) add(residual, residual_rows, grad_out, vecs, delta);
  }

 private:
  void add(RowOperand<Pairs>& rows, const RowSource& source, LaneOperand<Pairs>& grad_out, int64_t vecs,
           float* delta) {
    rows.load(source);
    for (int64_t first = 0; first < source.rows; first += 16) {
      const int64_t count = smaller(source.rows - first, 16);
      if (grad_out.special || rows.special(first, count)) {
        multiply_lanes<Pairs>(rows, first, count, grad_out, source.columns, vecs * 16, product);
      } else {
        multiply_pieces(rows, first, count, grad_out, first, source.columns, 1, product + first);
      }
      for (int64_t i = 0; i < count; ++i) delta[first + i] += product[i * kLanes<Pairs> + first + i];
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
