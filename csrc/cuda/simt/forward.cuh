// The forward: online softmax over tiles of keys. A block owns kRows queries of one head and up to
// kOutputColumns columns of the values; nothing of size queries x keys exists outside of its registers. Of
// thin sequences it owns a split of the keys as well.
#pragma once

#include "../../core/visible_range.h"
#include "../common/grid.cuh"
#include "../common/row_state.cuh"
#include "../split/merge_splits.h"
#include "key_rows.cuh"
#include "scores.cuh"
#include "store.cuh"

namespace selfattn::cuda::simt {

// What a block works at. It lies in shared memory: registers are for sums, and what is read from there
// between two barriers takes none of them meanwhile.
template <DType kDType>
struct ForwardPlan {
  using T = typename Element<kDType>::Accumulation;

  HeadTile at;
  Sequence sequence;
  int64_t first_column;  // of the values
  int rows;              // of the queries, at most kRows; 0 where the block has nothing to do
  int split, splits;     // of the sequence's keys
  KeyRange visible;      // of the split
  RowSource<kDType> queries;
  KeyRows<kDType> keys, values;

  static __host__ __device__ __forceinline__ int64_t value_parts(const AttentionParams& p) {
    return p.value_dim > 0 ? divide_up(p.value_dim, kOutputColumns) : 1;
  }

  // Which blocks take a sequence is a matter of its own length, as the bits differ. The grid is that of the
  // longest.
  __device__ __forceinline__ ForwardPlan(const AttentionParams& p, const SplitLaunch<T>& thin, int64_t block)
      : at(tile_of(p, thin, block / value_parts(p))),
        sequence(sequence_of(p, at.batch)),
        first_column(block % value_parts(p) * kOutputColumns),
        rows(at.first_row < sequence.queries ? smaller(sequence.queries - at.first_row, kTileRows) : 0),
        split(0),
        splits(1),
        visible(visible_keys(positions_of(p, sequence), at.first_row, at.first_row + rows - 1)),
        queries(p.query, sequence.query_batch, at.head, sequence.first_query),
        keys(p.key, p.pages, sequence, p.kv_head(at.head)),
        values(p.value, p.pages, sequence, p.kv_head(at.head)) {
    if ((sequence.queries <= kThinQueries) != (thin.queries > 0)) rows = 0;
    if (thin.queries == 0) return;
    const Splits<int64_t> cuts = splits_of(sequence.keys);
    split = static_cast<int>(block / (value_parts(p) * (p.heads / p.kv_heads)) % thin.splits);
    splits = cuts.count;
    if (split >= splits) rows = 0;
    const int64_t begin = split * cuts.keys, end = begin + cuts.keys;
    if (visible.begin < begin) visible.begin = begin;
    if (visible.end > end) visible.end = end;
  }

 private:
  static constexpr int kTileRows = kRows<T>;
  static_assert(kTileRows >= kThinQueries, "a thin sequence is one tile");

  // Blocks of thin sequences which run together share keys and values in the cache: the heads of a kv head
  // come first, then the splits.
  static __device__ __forceinline__ HeadTile tile_of(const AttentionParams& p, const SplitLaunch<T>& thin,
                                                     int64_t block) {
    if (thin.queries == 0) return HeadTile(block, p.heads, p.queries, kTileRows);
    const int64_t group = p.heads / p.kv_heads;
    const int64_t kv_head = block / group / thin.splits;
    return HeadTile(thin.first_batch * p.heads + kv_head * group + block % group, p.heads, 1, kTileRows);
  }
};

// A block's shared memory. Narrow heads keep their queries for all keys; those of wide heads are loaded again
// with every tile of keys, for several blocks to fit a multiprocessor.
template <DType kDType>
struct ForwardShared {
  using T = typename Element<kDType>::Accumulation;
  static constexpr int kResidentDims = 64;
  static constexpr int kPlanBytes = 384;
  static_assert(sizeof(ForwardPlan<kDType>) <= kPlanBytes, "panels begin where the plan has ended");

  ForwardPlan<kDType>* plan;
  T* columns;  // kColumnPanel: keys, then values
  T* weights;  // kWeightPanel
  T* queries;  // one kRowPanel, or as many as the head has

  __device__ __forceinline__ explicit ForwardShared(unsigned char* memory)
      : plan(reinterpret_cast<ForwardPlan<kDType>*>(memory)),
        columns(reinterpret_cast<T*>(memory + kPlanBytes)),
        weights(columns + kColumnPanel<T>),
        queries(weights + kWeightPanel<T>) {}

  static __host__ __device__ __forceinline__ bool resident(int64_t head_dim) {
    return head_dim <= kResidentDims;
  }
  static size_t bytes(int64_t head_dim) {
    const int64_t panels = resident(head_dim) ? divide_up(head_dim, kDepth<T>) : 1;
    const int64_t elements = kColumnPanel<T> + kWeightPanel<T> + panels * kRowPanel<T>;
    return kPlanBytes + static_cast<size_t>(elements) * sizeof(T);
  }
};

// The largest of the numbers that the threads of a row hold.
template <class T>
__device__ __forceinline__ T largest_of_row(T x) {
#pragma unroll
  for (int lanes = kThreadColumns / 2; lanes > 0; lanes /= 2) {
    x = larger(x, __shfl_xor_sync(kWholeWarp, x, lanes));
  }
  return x;
}

// Scores become weights relative to the largest score so far, -0 where hidden: see is_hidden. What the rows
// have summed up before follows their maximum. state.sum is this thread's share of a row's sum.
template <class T>
__device__ __forceinline__ void weigh(Fragment<T>& s, RowState<T> (&state)[kRowsPerThread<T>],
                                      Fragment<T> (&out)[kOutputPanels]) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    T most = s[r][0];
#pragma unroll
    for (int c = 1; c < kColumnsPerThread; ++c) most = larger(most, s[r][c]);
    const T factor = state[r].raise_max(largest_of_row(most));
    const T shift = state[r].shift();
    T sum = T(0);
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      const T weight = exponential(s[r][c] - shift);
      sum += weight;
      s[r][c] = s[r][c] == -infinity<T>() ? -T(0) : weight;
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) out[n][r][c] *= factor;
    }
    state[r].sum = multiply_add(state[r].sum, factor, sum);
  }
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const AttentionParams p, const ForwardOutputs outputs,
                   const SplitLaunch<typename Element<kDType>::Accumulation> thin,
                   const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const ForwardShared<kDType> shared(memory);
  ForwardPlan<kDType>& plan = *shared.plan;
  if (threadIdx.x == 0) plan = ForwardPlan<kDType>(p, thin, first_block + blockIdx.x);
  __syncthreads();
  if (plan.rows == 0) return;
  const Sequence& sequence = plan.sequence;
  const bool has_rows = warp_has_rows<T>(plan.rows);
  const bool partial = plan.splits > 1;

  Fragment<T> out[kOutputPanels];
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);
  RowState<T> state[kRowsPerThread<T>];
  if (p.sinks.data != nullptr && !partial) {
    const T sink = head_scalar<T>(p.sinks, sequence.batch, plan.at.head);
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      state[r] = RowState<T>::of_sink(sink);
      if (thread_column() != 0) state[r].sum = T(0);
    }
  }

  const bool resident = ForwardShared<kDType>::resident(p.head_dim);
  bool queries_missing = true;
  for (int64_t key = plan.visible.begin / kColumns * kColumns; key < plan.visible.end; key += kColumns) {
    ScoreTile<T> tile(p, sequence, plan.at.head, plan.at.first_row);
    tile.move_to(key);
    if (tile.has_mask() && !__syncthreads_or(has_rows && sees_any(tile))) continue;

    Fragment<T> s;
    clear<T>(s);
    for (int64_t dim = 0; dim < p.head_dim; dim += kDepth<T>) {
      T* const query_panel = shared.queries + (resident ? dim / kDepth<T> * kRowPanel<T> : 0);
      __syncthreads();  // everyone has finished with the panels
      if (queries_missing || !resident) {
        load_transposed<kDType, kRows<T>>(query_panel, plan.queries, plan.at.first_row, sequence.queries, dim,
                                          p.head_dim);
      }
      load_transposed<kDType, kColumns>(shared.columns, plan.keys, key, sequence.keys, dim, p.head_dim);
      __syncthreads();
      if (has_rows) multiply<T>(query_panel, shared.columns, smaller(p.head_dim - dim, kDepth<T>), s);
    }
    queries_missing = false;

    finish_scores(tile, shared.weights, s);
    weigh<T>(s, state, out);
    put_fragment<T>(shared.weights, s);
    if (p.dropout.enabled) {
      drop(DropoutPattern<T>(p.dropout, sequence.batch, plan.at.head), plan.at.first_row, key,
           shared.weights);
    }
    __syncwarp();  // the half-warp that shares rows reads their weights, and nobody else does

#pragma unroll
    for (int n = 0; n < kOutputPanels; ++n) {
      const int64_t column = plan.first_column + n * kColumns;
      if (column >= p.value_dim) continue;
      add_weighted<kDType>(shared.weights, shared.columns, plan.values, key, plan.visible.end, column,
                           p.value_dim, has_rows, out[n]);
    }
  }

  // Of splits everything is left as it is, for merge_splits to join.
  const int64_t first_row = partial ? thin.state(p.heads, sequence.batch, plan.at.head, 0) + plan.split
                                    : first_statistic_of(p, sequence, plan.at.head) + plan.at.first_row;
  const int64_t row_step = partial ? thin.splits : 1;
  T* const row_max = partial ? thin.max : static_cast<T*>(outputs.row_max);
  T* const row_sum = partial ? thin.sum : static_cast<T*>(outputs.row_sum);
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    state[r].sum = sum_of_row(state[r].sum);
    const int row = fragment_row<T>(r);
    if (plan.first_column == 0 && thread_column() == 0 && row < plan.rows) {
      row_max[first_row + row * row_step] = state[r].max;
      row_sum[first_row + row * row_step] = state[r].sum;
    }
  }
  if (partial) {
    View sums;
    sums.data = thin.out + first_row * p.value_dim;
    sums.stride[2] = row_step * p.value_dim;
    const RowTarget<kAccumulation<T>> target(sums, nullptr, 0, 0);
#pragma unroll
    for (int n = 0; n < kOutputPanels; ++n) {
      store_fragment<kAccumulation<T>, T>(target, 0, plan.rows, plan.first_column + n * kColumns, p.value_dim,
                                          out[n]);
    }
    return;
  }
  const RowTarget<kDType> target(outputs.out, outputs.out_residual, sequence.query_batch, plan.at.head,
                                 sequence.first_query);
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const T inverse = state[r].inverse_sum();
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) out[n][r][c] = normalised(out[n][r][c], inverse);
    }
    store_fragment<kDType, T>(target, plan.at.first_row, sequence.queries, plan.first_column + n * kColumns,
                              p.value_dim, out[n]);
  }
}

template <DType kDType>
void forward(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const int64_t parts = ForwardPlan<kDType>::value_parts(p);
  const size_t bytes = ForwardShared<kDType>::bytes(p.head_dim);
  if (may_be_thin(p)) {
    auto thin = first_split_launch<T>(p, where.workspace, /*rounds=*/false);
    const bool pairs = writable_by_pairs(p, outputs);
    do {
      const int64_t blocks = thin.batches * p.heads * thin.splits * parts;
      launch_blocks(&forward_kernel<kDType>, blocks, kThreads, bytes, where, p, outputs, thin);
      if (thin.splits > 1) {
        run_merge<kDType>(MergePlan<T>{p, outputs, thin, T(1), pairs}, where.stream);
      }
    } while (next_split_launch(p, thin));
  }
  if (is_thin(p)) return;
  const int64_t blocks = p.batch * p.heads * divide_up(p.queries, kRows<T>) * parts;
  launch_blocks(&forward_kernel<kDType>, blocks, kThreads, bytes, where, p, outputs, SplitLaunch<T>{});
}

}  // namespace selfattn::cuda::simt
