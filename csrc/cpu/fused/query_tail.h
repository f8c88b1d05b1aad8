// The tail of a strip: up to a quarter of a vector of queries that would leave most lanes of a vector of
// their own empty. Their products have lanes over the head dim instead, as those of few queries have, and
// meet the strip's other lanes in its blocks of scores and its sums.
#pragma once

#include "../products/few_query_scores.h"
#include "../products/few_query_values.h"
#include "query_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Computes s[j][lane] = <query, row from + j of rows> for all lanes of a strip; `tail` holds the rows of its
// tail, as they are in `lanes`.
template <class P>
void multiply_strip(const QueryStrip<P>& strip, const RowOperand<P>& rows, int64_t from, int64_t count,
                    LaneOperand<P>& lanes, const Scalar<P>* tail, int64_t columns, Scalar<P>* s) {
  if (strip.lanes > 0) multiply_lanes<P>(rows, from, count, lanes, columns, strip.lanes, s);
  if constexpr (kMostTail<P> > 0) {
    if (strip.lanes == strip.count) return;
    few_query_score_block<P>(tail, strip.count - strip.lanes, rows.rows.data + from * rows.rows.stride,
                             rows.rows.stride, count, columns, s + strip.lanes, kLanes<P>);
  }
}

// Updates c[column][lane] by the sum over the keys j of a(from + j, column) * w[j][lane] for the tail's
// lanes.
template <class T>
SELFATTN_OUT_OF_LINE void multiply_tail_columns(const QueryStrip<T>& strip, const Rows<T>& rows, int64_t keys,
                                                int64_t columns, const T* weights, const ColumnSums<T>& c,
                                                const T* visible, T* product) {
  constexpr int64_t ld = kLanes<T>;
  const int64_t count = strip.count - strip.lanes, padded = round_up_to_vector<T>(columns);
  T own_weights[kMostTail<T> * kKeyBlock], own_visible[kMostTail<T> * kKeyBlock];
  const auto gather = [&](const T* block, T* to) {
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t j = 0; j < keys; ++j) to[row * kKeyBlock + j] = block[j * ld + strip.lanes + row];
    }
  };
  gather(weights, own_weights);
  if (visible != nullptr) gather(visible, own_visible);
  memset(product, 0, static_cast<size_t>(count * padded) * sizeof(T));
  const int64_t row_bytes = rows.stride * static_cast<int64_t>(sizeof(T));
  const EvenRows even(dtype_of<T>(), rows.data, keys, row_bytes, row_bytes);
  few_query_values<T>(
      {own_weights, visible != nullptr ? own_visible : nullptr, kKeyBlock, columns, product, padded}, count,
      even.rows());
  for (int64_t row = 0; row < count; ++row) {
    const int64_t lane = strip.lanes + row;
    const T scale = c.update == Update::kScaleAdd ? c.lane_scale[lane] : T(1);
    for (int64_t e = 0; e < columns; ++e) {
      T* at = c.data + e * ld + lane;
      *at = *at * scale + product[row * padded + e];
    }
  }
}

// Updates the sums [column][lane] of all lanes of a strip; see multiply_columns.
template <class P>
void multiply_strip_columns(const QueryStrip<P>& strip, const ColumnOperand<P>& a, int64_t from, int64_t keys,
                            int64_t columns, const WeightOperand<P>& w, const ColumnSums<Scalar<P>>& c,
                            const Scalar<P>* visible) {
  if (strip.lanes > 0) multiply_columns<P>(a, from, keys, columns, w, strip.lanes, c, visible);
  if constexpr (kMostTail<P> > 0) {
    if (strip.lanes == strip.count || keys == 0) return;
    multiply_tail_columns<P>(strip, {a.rows.data + from * a.rows.stride, a.rows.stride}, keys, columns,
                             w.block, c, visible, strip.tail_product);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
