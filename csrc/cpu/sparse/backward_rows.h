// The step of the backward of selected keys for few heads: see row_tile.h.
#pragma once

#include "../fused/gradient_row.h"
#include "../products/few_query_outer.h"
#include "../products/few_query_values.h"
#include "gradient_tile.h"
#include "row_tile.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The heads of a query that share lists and a kv head, and the memory for a tile.
template <class T>
class SelectedGradientRows {
 public:
  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t count, Arena& arena) {
    heads = count;
    query_stride = round_up_to_vector<T>(p.head_dim);
    value_stride = round_up_to_vector<T>(p.value_dim);
    query = arena.take<T>(heads * query_stride);
    grad_out = arena.take<T>(heads * value_stride);
    rows = arena.take<GradientRow<T>>(heads);
    for (T** of_heads : {&weights, &grad, &visible, &bias}) *of_heads = arena.take<T>(heads * kMost);
    for (T** of_one : {&cap, &keep, &distance}) *of_one = arena.take<T>(kMost);
    listed = arena.take<const char*>(2 * kMost);
    for (T*** sums : {&key_sums, &value_sums}) *sums = arena.take<T*>(kMost);
  }

  // Loads the rows of a query; `row.head` is the first head, and `deltas` are those of all rows. Tiles add to
  // the heads' rows of dQ, which lack the scale, and to their slopes.
  SELFATTN_OUT_OF_LINE void begin(const AttentionParams& p, const BackwardArguments& a, const DecodeRow& row,
                                  const T* deltas, const RowSums<T>& of_query, T* of_slopes) {
    grad_query = of_query;
    slopes = of_slopes;
    first = row;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = row.head + h, index = p.row(row.batch, head, row.query);
      const auto load = [&](T* to, const View& view, int64_t columns, T factor) {
        load_padded_row<T>(to, element(view.data, p.dtype, view.offset(row.batch, head, row.query)), p.dtype,
                           columns, factor);
      };
      load(query + h * query_stride, p.query, p.head_dim, static_cast<T>(p.scale));
      load(grad_out + h * value_stride, a.grad_out, p.value_dim, T(1));
      rows[h] = gradient_row(static_cast<const T*>(a.row_max)[index], static_cast<const T*>(a.row_sum)[index],
                             deltas[index]);
    }
  }

  // The heads meet a tile of keys. It adds to the sums of keys, the first of which is `first_key`.
  SELFATTN_OUT_OF_LINE void meet(const AttentionParams& p, const BackwardArguments& a, const TileKeys& tile,
                                 const KeySums<T>& sums, int64_t first_key) {
    const bool biased = !sees_whole_tile(p, first.query, tile), masked = p.mask.data != nullptr;
    bool shown = !biased;
    for (int64_t h = 0; biased && h < heads; ++h) {
      shown |= load_row_bias(p, first.batch, first.head + h, first.query, tile, bias + h * kMost, 1);
    }
    if (!shown) return;
    const int64_t kv_head = p.kv_head(first.head), count = tile.count;
    const char** const values = listed + count;
    list_rows(p, p.key, first.batch, kv_head, tile, listed);
    list_rows(p, p.value, first.batch, kv_head, tile, values);
    const ListedRows key_rows(p.dtype, listed, count, 2 * count), value_rows(p.dtype, values, count, count);
    few_query_scores<T, true>(query, heads, key_rows.rows(), p.head_dim, weights, kMost, 1);
    few_query_scores<T, true>(grad_out, heads, value_rows.rows(), p.value_dim, grad, kMost, 1);
    for (int64_t h = 0; h < heads; ++h) slopes[h] += weigh(p, a, tile, h, biased);
    for (int64_t j = 0; j < count; ++j) {
      key_sums[j] = sums.key.data + (tile.key[j] - first_key) * sums.key.stride;
      value_sums[j] = sums.value.data + (tile.key[j] - first_key) * sums.value.stride;
    }
    // Only masks hide keys of a tile. 0 * Inf and 0 * NaN of what is hidden are left out from the start.
    const T* const seen = biased && masked ? visible : nullptr;
    add_few_query_outer<T>({weights, seen, kMost, grad_out, heads, value_stride}, count, value_sums,
                           value_stride);
    add_few_query_outer<T>({grad, seen, kMost, query, heads, query_stride}, count, key_sums, query_stride);
    few_query_values<T, true>({grad, seen, kMost, p.head_dim, grad_query.data, grad_query.stride}, heads,
                              key_rows.rows());
  }

 private:
  static constexpr int64_t kMost = TileKeys::kMost;

  int64_t heads = 0, query_stride = 0, value_stride = 0;  // strides are whole vectors
  RowSums<T> grad_query{};
  T* slopes = nullptr;
  DecodeRow first{};                   // of the first head
  T *query, *grad_out;                 // [heads][stride], the queries times the scale
  GradientRow<T>* rows;                // [heads]
  T *weights, *grad, *visible, *bias;  // [heads][kMost]
  T *cap, *keep, *distance;            // [kMost] of one row: its GradientTerms
  const char** listed;                 // [2 kMost] where rows of the tile's keys and values begin
  T **key_sums, **value_sums;          // where their sums do

  // Turns a head's products into weights and dS, and returns the sum of dS times -distance.
  T weigh(const AttentionParams& p, const BackwardArguments& a, const TileKeys& tile, int64_t h,
          bool biased) {
    T* const scores = weights + h * kMost;
    GradientTerms<T> terms;
    if (p.softcap > 0.0) {
      keep_softcap_gradient<T>(p, tile.count, scores, cap);
      terms.cap = cap;
    }
    finish_scores_of_row<T>(p, tile.count, biased ? bias + h * kMost : nullptr, scores);
    if (biased) mark_visible_row<T>(tile.count, scores, visible + h * kMost);
    if (p.dropout.enabled) {
      row_dropout(p.dropout, first.batch, first.head + h, first.query, tile, keep_scale<T>(p.dropout), keep,
                  1);
      terms.keep = keep;
    }
    if (a.grad_slopes_rows != nullptr) {
      const int64_t position = first.query + p.query_offset;
      for (int64_t j = 0; j < round_up_to_vector<T>(tile.count); ++j) {
        const int64_t behind = position - tile.key[smaller(j, tile.count - 1)];
        distance[j] = static_cast<T>(behind < 0 ? -behind : behind);
      }
      terms.distance = distance;
    }
    return weigh_gradient_row<T>(rows[h], terms, tile.count, scores, grad + h * kMost);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
