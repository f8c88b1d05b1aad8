// Writes the matrix of scores (attention_scores) or of weights (attention_weights).
//
// Weights are computed from the row statistics of the forward. A block computes one tile.
#pragma once

#include "../../core/visible_range.h"
#include "../common/row_state.cuh"
#include "../function/launch_with_function.cuh"
#include "key_rows.cuh"
#include "scores.cuh"
#include "store.cuh"

namespace selfattn::cuda::simt {

template <class T>
constexpr size_t kScoreMatrixBytes =
    static_cast<size_t>(kColumnPanel<T> + kRowPanel<T> + kWeightPanel<T>) * sizeof(T);

// Turns final scores into weights, which are 0 for hidden scores and in rows that see nothing.
template <class T>
__device__ __forceinline__ void normalise(const T* row_max, const T* row_sum, int rows, Fragment<T>& s) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    const int row = fragment_row<T>(r);
    if (row >= rows) continue;
    const RowState<T> state{row_max[row], row_sum[row]};
    const T inverse = state.inverse_sum();
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) s[r][c] = state.weight(s[r][c], inverse);
  }
}

// `statistics.row_max` is null if the scores are wanted, not the weights. The result lies in `matrix`.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, 4)
    score_matrix_kernel(const AttentionParams p, const WeightsOutputs statistics, const View matrix,
                        const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  T* const key_panel = reinterpret_cast<T*>(memory);
  T* const query_panel = key_panel + kColumnPanel<T>;
  T* const score_panel = query_panel + kRowPanel<T>;

  const int64_t block = first_block + blockIdx.x;
  const int64_t key_tiles = divide_up(p.keys, kColumns);
  const int64_t first_key = block % key_tiles * kColumns;
  const HeadTile at(block / key_tiles, p.heads, p.queries, kRows<T>);
  const Sequence sequence = sequence_of(p, at.batch);
  // Only longer sequences have this tile.
  if (at.first_row >= sequence.queries || first_key >= sequence.keys) return;
  const RowSource<kDType> queries(p.query, sequence.query_batch, at.head, sequence.first_query);
  const KeyRows<kDType> keys(p.key, p.pages, sequence, p.kv_head(at.head));
  const int rows = smaller(sequence.queries - at.first_row, kRows<T>);

  Fragment<T> s;
  clear<T>(s);
  const KeyRange visible = visible_keys(positions_of(p, sequence), at.first_row, at.first_row + rows - 1);
  const bool shown = first_key < visible.end && first_key + kColumns > visible.begin;
  for (int64_t dim = 0; shown && dim < p.head_dim; dim += kDepth<T>) {
    __syncthreads();
    load_transposed<kDType, kRows<T>>(query_panel, queries, at.first_row, sequence.queries, dim, p.head_dim);
    load_transposed<kDType, kColumns>(key_panel, keys, first_key, sequence.keys, dim, p.head_dim);
    __syncthreads();
    multiply<T>(query_panel, key_panel, smaller(p.head_dim - dim, kDepth<T>), s);
  }

  if (shown) {
    ScoreTile<T> tile(p, sequence, at.head, at.first_row);
    tile.move_to(first_key);
    finish_scores(tile, score_panel, s);
  }
  if (statistics.row_max != nullptr && shown) {
    const int64_t row = first_statistic_of(p, sequence, at.head) + at.first_row;
    normalise<T>(static_cast<const T*>(statistics.row_max) + row,
                 static_cast<const T*>(statistics.row_sum) + row, rows, s);
    if (p.dropout.enabled) {
      put_fragment<T>(score_panel, s);
      drop(DropoutPattern<T>(p.dropout, at.batch, at.head), UnfoldedRows{at.first_row}, first_key,
           score_panel);
      get_fragment<T>(score_panel, s);
    }
  }
  const RowTarget<kDType> target(matrix, nullptr, at.batch, at.head);
  store_fragment<T>(target, at.first_row, sequence.queries, first_key, sequence.keys, s);
}

template <DType kDType>
void launch_score_matrix(const AttentionParams& p, const WeightsOutputs& statistics, const View& matrix,
                         const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const int64_t blocks = p.batch * p.heads * divide_up(p.queries, kRows<T>) * divide_up(p.keys, kColumns);
  launch_blocks_with_function(p.function, &score_matrix_kernel<kDType>, blocks, kThreads,
                              kScoreMatrixBytes<T>, where, p, statistics, matrix);
}

template <DType kDType>
void weights(const AttentionParams& p, const WeightsOutputs& outputs, const Launch& where) {
  launch_score_matrix<kDType>(p, outputs, outputs.weights, where);
}

template <DType kDType>
void scores(const ScoresParams& s, const Launch& where) {
  launch_score_matrix<kDType>(attention_of(s), {}, s.scores, where);
}

}  // namespace selfattn::cuda::simt
