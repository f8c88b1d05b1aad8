// Statistics of scores and sums of weights, from the row statistics of a forward: Note [Statistics of scores]
// in core/attention_params.h. Each pass computes the scores again.
//
// In the pass by rows a block owns queries of a head, and in the pass by keys it owns keys of a head. Either
// adds to its own sums in the order of the tiles, so that two runs give the same bits.
#pragma once

#include "../../core/visible_range.h"
#include "../common/row_state.cuh"
#include "../function/launch_with_function.cuh"
#include "key_rows.cuh"
#include "score_matrix.cuh"

namespace selfattn::cuda::simt {

// A pass by rows writes these. Pointers of results that are not wanted are null.
template <class T>
struct RowPass {
  const T *row_max, *row_sum;
  T *row_top, *row_mean;
  const T* per_key;
  T* of_queries;
};

// The panels of a block that computes scores, in shared memory.
template <class T>
struct ScorePanels {
  T *keys, *queries, *scores;

  __device__ __forceinline__ explicit ScorePanels(unsigned char* memory)
      : keys(reinterpret_cast<T*>(memory)), queries(keys + kColumnPanel<T>), scores(queries + kRowPanel<T>) {}
};

// Computes the final scores of a tile; all threads must call it. The tile stands at its first query, and is
// moved to its first key.
template <DType kDType, class T>
__device__ __forceinline__ void score_tile(const AttentionParams& p, const Sequence& sequence,
                                           const RowSource<kDType>& queries, const KeyRows<kDType>& keys,
                                           int64_t first_row, int64_t first_key, ScoreTile<T>& tile,
                                           const ScorePanels<T>& panels, Fragment<T>& s) {
  clear<T>(s);
  for (int64_t dim = 0; dim < p.head_dim; dim += kDepth<T>) {
    __syncthreads();  // all threads have finished with the panels
    load_transposed<kDType, kRows<T>>(panels.queries, queries, first_row, sequence.queries, dim, p.head_dim);
    load_transposed<kDType, kColumns>(panels.keys, keys, first_key, sequence.keys, dim, p.head_dim);
    __syncthreads();
    multiply<T>(panels.queries, panels.keys, smaller(p.head_dim - dim, kDepth<T>), s);
  }
  tile.move_to(first_key);
  finish_scores(tile, panels.scores, s);
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 2)
    row_statistics_kernel(const AttentionParams p, const RowPass<typename Element<kDType>::Accumulation> pass,
                          const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const ScorePanels<T> panels(memory);
  const HeadTile at(first_block + blockIdx.x, p.heads, p.queries, kRows<T>);
  const Sequence sequence = sequence_of(p, at.batch);
  if (at.first_row >= sequence.queries) return;  // only longer sequences have these rows
  const int rows = smaller(sequence.queries - at.first_row, kRows<T>);
  const RowSource<kDType> queries(p.query, sequence.query_batch, at.head, sequence.first_query);
  const KeyRows<kDType> keys(p.key, p.pages, sequence, p.kv_head(at.head));
  const int64_t first_statistic = first_statistic_of(p, sequence, at.head) + at.first_row;
  ScoreTile<T> tile(p, sequence, at.head, at.first_row);

  RowState<T> state[kRowsPerThread<T>];
  T top[kRowsPerThread<T>], sum[kRowsPerThread<T>];
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    const int64_t row = first_statistic + min(fragment_row<T>(r), rows - 1);
    state[r].max = pass.row_max[row];
    state[r].sum = pass.row_sum[row];
    top[r] = -infinity<T>();
    sum[r] = T(0);
  }
  const KeyRange visible = visible_keys(positions_of(p, sequence), at.first_row, at.first_row + rows - 1);
  const T* const per_key =
      pass.per_key == nullptr ? nullptr : pass.per_key + first_key_number(p, sequence, at.head);
  for (int64_t key = visible.begin / kColumns * kColumns; key < visible.end; key += kColumns) {
    Fragment<T> s;
    score_tile<kDType>(p, sequence, queries, keys, at.first_row, key, tile, panels, s);
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const T inverse = state[r].inverse_sum();
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) {
        const T score = s[r][c], weight = state[r].weight(score, inverse);
        top[r] = larger(top[r], score);
        if (weight == T(0)) continue;
        const T factor = per_key == nullptr ? score - state[r].shift() : per_key[key + fragment_column<T>(c)];
        sum[r] = multiply_add(weight, factor, sum[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    sum[r] = sum_of_row(sum[r]);
    top[r] = largest_of_row(top[r]);
    const int row = fragment_row<T>(r);
    if (thread_column() != 0 || row >= rows) continue;
    if (pass.of_queries != nullptr) pass.of_queries[first_statistic + row] = sum[r];
    if (pass.row_mean == nullptr) continue;
    if (p.sinks.data != nullptr) {
      const T sink = head_scalar<T>(p.sinks, sequence.batch, at.head);
      const T weight = state[r].weight(sink, state[r].inverse_sum());
      if (weight != T(0)) sum[r] = multiply_add(weight, sink - state[r].shift(), sum[r]);
    }
    pass.row_top[first_statistic + row] = top[r];
    // Another kernel's scores, of which row_max and row_sum are, may differ from these by rounding. An
    // entropy is not below 0 for that.
    const T most = state[r].sum == T(0) ? T(0) : logarithm(state[r].sum);
    pass.row_mean[first_statistic + row] = sum[r] > most ? most : sum[r];
  }
}

// Adds up the weights of each key. Thread n < kColumns owns key n of the block.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, 3)
    key_sums_kernel(const AttentionParams p, const WeightSums sums, const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const ScorePanels<T> panels(memory);
  const HeadTile at(first_block + blockIdx.x, p.heads, p.keys, kColumns);
  const int64_t first_key = at.first_row;
  const Sequence sequence = sequence_of(p, at.batch);
  if (first_key >= sequence.keys) return;  // only longer sequences have these keys
  const RowSource<kDType> queries(p.query, sequence.query_batch, at.head, sequence.first_query);
  const KeyRows<kDType> keys(p.key, p.pages, sequence, p.kv_head(at.head));
  const int columns = smaller(sequence.keys - first_key, kColumns);
  const int64_t first_statistic = first_statistic_of(p, sequence, at.head);
  const int column = static_cast<int>(threadIdx.x);

  double sum = 0.0;
  const QueryRange seeing = visible_queries(positions_of(p, sequence), first_key, first_key + columns - 1);
  for (int64_t query = seeing.begin / kRows<T> * kRows<T>; query < seeing.end; query += kRows<T>) {
    const int rows = smaller(sequence.queries - query, kRows<T>);
    ScoreTile<T> tile(p, sequence, at.head, query);
    Fragment<T> s;
    score_tile<kDType>(p, sequence, queries, keys, query, first_key, tile, panels, s);
    const int64_t row = first_statistic + query;
    normalise<T>(static_cast<const T*>(sums.row_max) + row, static_cast<const T*>(sums.row_sum) + row, rows,
                 s);
    put_fragment<T>(panels.scores, s);
    __syncthreads();
    if (column < columns) {
      T of_tile = T(0);
      for (int r = 0; r < rows; ++r) of_tile += panels.scores[panel_index<T, kRows<T>>(column, r)];
      sum += static_cast<double>(of_tile);
    }
    __syncthreads();
  }
  if (column < columns) {
    static_cast<T*>(sums.of_keys)[first_key_number(p, sequence, at.head) + first_key + column] =
        static_cast<T>(sum);
  }
}

template <DType kDType>
void launch_row_pass(const AttentionParams& p, const RowPass<typename Element<kDType>::Accumulation>& pass,
                     const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const int64_t blocks = p.batch * p.heads * divide_up(p.queries, kRows<T>);
  launch_blocks_with_function(p.function, &row_statistics_kernel<kDType>, blocks, kThreads,
                              kScoreMatrixBytes<T>, where, p, pass);
}

// Fills row_top and row_mean, once a forward has filled row_max and row_sum.
template <DType kDType>
void statistics(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  launch_row_pass<kDType>(
      p,
      {static_cast<const T*>(outputs.row_max), static_cast<const T*>(outputs.row_sum),
       static_cast<T*>(outputs.row_top), static_cast<T*>(outputs.row_mean), nullptr, nullptr},
      where);
}

template <DType kDType>
void weight_sums(const AttentionParams& p, const WeightSums& sums, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  if (sums.of_queries != nullptr) {
    return launch_row_pass<kDType>(
        p,
        {static_cast<const T*>(sums.row_max), static_cast<const T*>(sums.row_sum), nullptr, nullptr,
         static_cast<const T*>(sums.per_key), static_cast<T*>(sums.of_queries)},
        where);
  }
  const int64_t blocks = p.batch * p.heads * divide_up(p.keys, kColumns);
  launch_blocks_with_function(p.function, &key_sums_kernel<kDType>, blocks, kThreads, kScoreMatrixBytes<T>,
                              where, p, sums);
}

}  // namespace selfattn::cuda::simt
