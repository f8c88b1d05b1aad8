// A backward worker's memory, and the length of a chunk of keys, which it limits. The memory holds the
// chunk's keys and values as the products take them, the chunk's sums, and a panel of strips.
#pragma once

#include "gradient_panel.h"
#include "gradient_results.h"
#include "mask_sum.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Returns the keys per chunk: dK and dV of a chunk in T take at most kChunkBytes of the level-2 cache. It
// depends on the head dims only, because the length of a chunk changes the rounding of dQ.
template <class P>
int64_t chunk_keys(const AttentionParams& p) {
  using T = Scalar<P>;
  constexpr int64_t kMostKeys = 512;  // with narrow heads, longer chunks would leave some threads without one
  const int64_t row = (round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim)) * sizeof(T);
  const int64_t keys = row > 0 ? kChunkBytes<P> / row : kChunkBytes<P>;
  return limited(keys / kKeyBlock * kKeyBlock, kKeyBlock, kMostKeys);
}

template <class P>
int64_t chunk_count(const AttentionParams& p) {
  const int64_t chunk = chunk_keys<P>(p);
  return p.keys == 0 ? 1 : divide_up(p.keys, chunk);
}

template <class P>
struct BackwardScratch {
  using T = Scalar<P>;

  // The lanes of a panel, in whole tiles, as products may need them.
  static constexpr int64_t kPanelLanes = kPanelStrips<P> * kLanes<P>;

  GradientScratch<P> block;
  GradientStrip<P> strips[kPanelStrips<P>];
  int64_t head_stride, value_stride;           // padded row lengths
  VectorOperand<P> query_rows, grad_out_rows;  // of a panel
  T* grad_query_t[kPanelStrips<P>];            // [head_dim][kLanes]
  RowOperand<P> key_rows, value_rows;
  ColumnOperand<P> key_columns;
  T *grad_key, *grad_value;        // [chunk][padded]
  T* slope_rows[kPanelStrips<P>];  // [kLanes] the strip's share of grad_slopes_rows
  QuerySums<P> query_sums;
  typename MaskSum<P>::Scratch mask;

  // `rows` is the most keys of a chunk.
  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t rows, const MaskSum<P>& mask_sum,
                                     Arena& arena) {
    head_stride = round_up_to_vector<T>(p.head_dim);
    value_stride = round_up_to_vector<T>(p.value_dim);
    block.allocate(p, arena);
    for (int64_t i = 0; i < kPanelStrips<P>; ++i) {
      strips[i].allocate(p, arena);
      grad_query_t[i] = arena.take<T>(head_stride * kLanes<P>);
      slope_rows[i] = arena.take<T>(kLanes<P>);
    }
    query_rows.allocate(p, kPanelLanes, p.head_dim, arena);
    grad_out_rows.allocate(p, kPanelLanes, p.value_dim, arena);
    key_rows.allocate(p, rows, p.head_dim, arena);
    value_rows.allocate(p, rows, p.value_dim, arena);
    key_columns.allocate_shared(p, rows, p.head_dim, arena);
    grad_key = arena.take<T>(rows * head_stride);
    grad_value = arena.take<T>(rows * value_stride);
    query_sums.allocate(p, arena);
    mask.allocate(mask_sum, rows, arena);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
