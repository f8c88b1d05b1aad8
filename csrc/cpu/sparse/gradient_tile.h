// The step of the backward of selected keys: a strip of queries meets a tile of keys.
#pragma once

#include "../fused/backward_scratch.h"
#include "lists.h"
#include "tile.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The memory of a worker beside the sums of its item.
template <class P>
struct SelectedGradientScratch {
  using T = Scalar<P>;

  GradientScratch<P> block;
  GradientStrip<P> strip;
  VectorOperand<P> query_vectors, grad_out_vectors;
  RowOperand<P> keys, values;
  ColumnOperand<P> key_columns;
  T* grad_query_t;                                           // [head_dim][kLanes]
  T* slope_rows;                                             // [kLanes]
  T* factors;                                                // [kKeyBlock][kLanes] of dropout
  char *query_rows, *grad_out_rows, *key_rows, *value_rows;  // gathered
  bool rows_are_finite;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t most_keys, Arena& arena) {
    block.allocate(p, arena);
    strip.allocate(p, arena);
    query_vectors.allocate(p, kLanes<P>, p.head_dim, arena);
    grad_out_vectors.allocate(p, kLanes<P>, p.value_dim, arena);
    keys.allocate(p, most_keys, p.head_dim, arena);
    values.allocate(p, most_keys, p.value_dim, arena);
    key_columns.allocate_shared(p, most_keys, p.head_dim, arena);
    grad_query_t = arena.take<T>(round_up_to_vector<T>(p.head_dim) * kLanes<P>);
    slope_rows = arena.take<T>(kLanes<P>);
    factors = arena.take<T>(p.dropout.enabled ? kKeyBlock * kLanes<P> : 0);
    query_rows = arena.take<char>(copied_bytes<P>(p, kLanes<P>, p.head_dim));
    grad_out_rows = arena.take<char>(copied_bytes<P>(p, kLanes<P>, p.value_dim));
    key_rows = arena.take<char>(copied_bytes<P>(p, kKeyBlock, p.head_dim));
    value_rows = arena.take<char>(copied_bytes<P>(p, kKeyBlock, p.value_dim));
  }

  void load_keys(const RowSource& key_source, const RowSource& value_source) {
    keys.load(key_source);
    key_columns.load_shared(key_source, keys);
    values.load(value_source);
  }

  // Loads the queries of a strip, see QueryStrip::begin; `deltas` are those of all rows.
  SELFATTN_OUT_OF_LINE void begin(const AttentionParams& p, const BackwardArguments& a,
                                  const TileRows<P>& rows, bool as_tail, const T* deltas) {
    const RowSource queries = gathered<P>(p, rows, p.query, p.head_dim, query_rows);
    const RowSource grads = gathered<P>(p, rows, a.grad_out, p.value_dim, grad_out_rows).as_gradient();
    strip.begin(p, queries, as_tail);
    if (strip.lanes > 0) strip.grad_out.load(grads);
    if constexpr (kMostTail<P> > 0) {
      if (strip.lanes == 0) strip.load_tail(grads, T(1), strip.tail_grad_out);
    }
    query_vectors.load(queries);
    grad_out_vectors.load(grads);
    rows_are_finite = true;
    if constexpr (kDirect<P>) {
      const auto finite = [](const VectorOperand<P>& operand, const RowSource& s) {
        return all_finite(operand.rows.data, operand.rows.stride, s.rows, s.columns);
      };
      rows_are_finite = finite(query_vectors, queries) && finite(grad_out_vectors, grads);
    } else {
      block.grad.in_float = nullptr;  // numbers of one piece all have a piece
    }
    strip.ordinary = true;
    for (int64_t lane = 0; lane < strip.vecs * Simd<T>::kWidth; ++lane) {
      const bool past_last = lane >= rows.count;
      const int64_t row = past_last ? 0 : rows.row(p, lane);
      const T most = static_cast<const T*>(a.row_max)[row], sum = static_cast<const T*>(a.row_sum)[row];
      strip.delta[lane] = past_last ? T(0) : deltas[row];
      strip.row_max[lane] = past_last || most == -std::numeric_limits<T>::infinity() ? T(0) : most;
      strip.inverse_sum[lane] = past_last || sum == T(0) ? T(0) : T(1) / sum;
      strip.ordinary &= strip.inverse_sum[lane] == strip.inverse_sum[lane];
      slope_rows[lane] = T(0);
    }
    memset(grad_query_t, 0, static_cast<size_t>(p.head_dim * kLanes<P>) * sizeof(T));
  }
};

// Sums of the gradients of keys and values, a row for each key of a tile.
template <class T>
struct KeySums {
  RowSums<T> key, value;
};

// Turns scores and dP of a tile into weights and dS, with the steps of grad_score_block.
template <class P>
void tile_score_gradients(const AttentionParams& p, const TileRows<P>& rows, const TileKeys& keys,
                          SelectedGradientScratch<P>& s) {
  using T = Scalar<P>;
  T *const weights = s.block.weights.block, *const grads = s.block.grad.block;
  if (p.dropout.enabled) {
    tile_dropout<P>(p.dropout, rows, keys, keep_scale<T>(p.dropout), s.factors);
    multiply_tile_by<P>(keys.count, s.strip.vecs, s.factors, grads);
  }
  for (int64_t lane = 0; lane < rows.count; lane += Simd<T>::kWidth) {
    with_vectors_of<P>(rows.count - lane, [&](auto vectors) {
      using V = decltype(vectors);
      const auto delta = V::load(s.strip.delta + lane);
      for (int64_t at = lane; at < keys.count * kLanes<P>; at += kLanes<P>) {
        V::store(grads + at, score_gradient<T, V>(V::load(weights + at), V::load(grads + at), delta));
      }
    });
  }
  if (p.dropout.enabled) multiply_tile_by<P>(keys.count, s.strip.vecs, s.factors, weights);
  for (int64_t lane = 0; p.alibi_slopes.data != nullptr && lane < rows.count; ++lane) {
    for (int64_t j = 0; j < keys.count; ++j) {
      const int64_t distance = rows.query[lane] + p.query_offset - keys.key[j];
      s.slope_rows[lane] -= static_cast<T>(distance < 0 ? -distance : distance) * grads[j * kLanes<P> + lane];
    }
  }
  if (p.softcap > 0.0) apply_softcap_gradient<P>(s.strip, keys.count, s.block.block.capped, grads);
}

// A strip meets a tile of keys, which are rows `from` and on of the operands in the scratch: it adds to
// grad_query_t and to the sums, whose first row is that of the tile's first key. `keys_are_finite` tells
// whether no key or value of the tile holds NaN or infinity, if products cannot see it.
template <class P>
void gradient_tile(const AttentionParams& p, const TileRows<P>& rows, const TileKeys& keys, int64_t from,
                   bool keys_are_finite, const KeySums<Scalar<P>>& sums, SelectedGradientScratch<P>& s) {
  const Shown shown = load_bias<P>(p, rows, keys, s.block.block.mask);
  if (shown == Shown::kNothing) return;
  WeightOperand<P>&weights = s.block.weights, &grads = s.block.grad;
  const Scalar<P> factor =
      tile_scores<P>(p, s.strip, s.keys, from, keys.count, shown, s.block.block, weights.block);
  const bool alone = (shown != Shown::kAll && !(keys_are_finite && s.rows_are_finite)) ||
                     s.query_vectors.special() || s.grad_out_vectors.special();
  const bool mark = alone || s.key_columns.special(from, keys.count);
  if (mark) mark_visible<P>(s.strip, keys.count, weights.block, s.block.visible);
  multiply_strip<P>(s.strip, s.values, from, keys.count, s.strip.grad_out, s.strip.tail_grad_out, p.value_dim,
                    grads.block);
  normalise_block<P>(p, s.strip, keys.count, s.strip.row_max, s.strip.inverse_sum, factor, !s.strip.ordinary,
                     weights.block);
  tile_score_gradients<P>(p, rows, keys, s);
  weights.ready_as_rows(keys.count, 0, rows.count, keys.count);
  grads.ready_as_rows(keys.count, 0, rows.count, keys.count);
  grads.ready_as_lanes(keys.count, s.strip.vecs);
  const Scalar<P>* visible = alone ? s.block.visible : nullptr;
  multiply_weights<P>(weights, keys.count, 0, rows.count, s.grad_out_vectors, p.value_dim, sums.value.data,
                      visible);
  multiply_weights<P>(grads, keys.count, 0, rows.count, s.query_vectors, p.head_dim, sums.key.data, visible);
  multiply_strip_columns<P>(s.strip, s.key_columns, from, keys.count, p.head_dim, grads, {s.grad_query_t},
                            mark ? s.block.visible : nullptr);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
