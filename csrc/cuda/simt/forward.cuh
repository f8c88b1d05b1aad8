// The forward: online softmax over tiles of keys.
//
// A block owns kRows queries of one head and up to kOutputColumns columns of the values. No memory of size
// queries x keys is needed. For few-query sequences a block owns the queries of several heads instead, and a
// split of the keys.
#pragma once

#include <type_traits>

#include "../../core/visible_range.h"
#include "../common/overflow.cuh"
#include "../common/row_state.cuh"
#include "../function/launch_with_function.cuh"
#include "../split/merge_splits.h"
#include "folded_rows.cuh"
#include "key_rows.cuh"
#include "scores.cuh"

namespace selfattn::cuda::simt {

// The place of a block in a launch.
struct BlockPlace {
  int64_t batch;
  int64_t head;       // with few queries, the first head of the kv head
  int64_t tile;       // with few queries, the tile of the kv head's heads; otherwise 0
  int64_t first_row;  // with many queries, the first of them; otherwise 0
  int64_t part;       // the part of the values' columns
  int split;          // the split of the keys
};

// The order of blocks is [batches][heads][tiles of queries][parts]. For few-query sequences it is
// [batches][kv heads][splits][tiles of heads][parts], so that blocks that run together share keys and values
// in the cache. The grid fits the longest sequence, so that blocks of shorter ones may have no rows.
template <class T, bool kFolded>
struct ForwardGrid {
  int64_t parts, tiles, splits, units;

  SELFATTN_HOST_DEVICE ForwardGrid(const AttentionParams& p, const SplitLaunch<T>& split_launch)
      : parts(p.value_dim > 0 ? divide_up(p.value_dim, kOutputColumns) : 1),
        tiles(kFolded ? divide_up(group_of(p), heads_of_tile(split_launch.queries))
                      : divide_up(p.queries, kRows<T>)),
        splits(split_launch.splits),
        units(kFolded ? split_launch.batches * p.kv_heads : p.batch * p.heads) {}

  SELFATTN_HOST_DEVICE int64_t blocks() const { return units * splits * tiles * parts; }

  __device__ __forceinline__ BlockPlace place(const AttentionParams& p, const SplitLaunch<T>& split_launch,
                                              int64_t block) const {
    const int64_t part = block % parts;
    block /= parts;
    if (!kFolded) {
      const HeadTile at(block, p.heads, p.queries, kRows<T>);
      return {at.batch, at.head, 0, at.first_row, part, 0};
    }
    const int64_t tile = block % tiles;
    block /= tiles;
    const int64_t unit = block / splits;
    return {split_launch.first_batch + unit / p.kv_heads,
            unit % p.kv_heads * group_of(p),
            tile,
            0,
            part,
            static_cast<int>(block % splits)};
  }

  static SELFATTN_HOST_DEVICE int64_t group_of(const AttentionParams& p) {
    return p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
  }
  // A tile holds only whole heads. Each head has so many queries.
  static SELFATTN_HOST_DEVICE int64_t heads_of_tile(int64_t queries) {
    return queries > 0 ? kRows<T> / queries : kRows<T>;
  }
};

// The work of a block. It lies in shared memory, because registers are needed for sums, and numbers that are
// read from there when they are used take none.
template <DType kDType, bool kFolded>
struct ForwardPlan {
  using T = typename Element<kDType>::Accumulation;
  using Grid = ForwardGrid<T, kFolded>;
  using Rows = std::conditional_t<kFolded, FoldedRows, UnfoldedRows>;
  using Queries = std::conditional_t<kFolded, FoldedSource<kDType>, RowSource<kDType>>;

  Sequence sequence;
  int64_t head;          // the first head
  int64_t first_row;     // the first of its queries
  int64_t first_column;  // of the values
  int rows;              // at most kRows; 0 if the block has nothing to do
  int split, splits;     // of the sequence's keys
  KeyRange visible;      // the visible keys of the split
  Queries queries;
  KeyRows<kDType> keys, values;

  // Only a sequence's own length decides which blocks compute it, because the bits of the results differ.
  __device__ __forceinline__ ForwardPlan(const AttentionParams& p, const BlockPlace& at)
      : sequence(sequence_of(p, at.batch)),
        head(at.head + at.tile * Grid::heads_of_tile(sequence.queries)),
        first_row(at.first_row),
        first_column(at.part * kOutputColumns),
        rows(rows_from(p, at)),
        split(at.split),
        splits(1),
        visible(visible_keys(positions_of(p, sequence), first_row,
                             (kFolded ? sequence.queries : first_row + rows) - 1)),
        queries(queries_from(p.query)),
        keys(p.key, p.pages, sequence, p.kv_head(at.head)),
        values(p.value, p.pages, sequence, p.kv_head(at.head)) {
    if (!kFolded) return;
    const Splits<int64_t> cuts = splits_of(sequence.keys);
    splits = cuts.count;
    if (split >= splits) rows = 0;
    const int64_t begin = split * cuts.keys, end = begin + cuts.keys;
    visible.begin = max(visible.begin, begin);
    visible.end = min(visible.end, end);
  }

  __device__ __forceinline__ Rows row_numbers() const {
    if constexpr (kFolded) {
      return {static_cast<int>(sequence.queries)};
    } else {
      return {first_row};
    }
  }

  // The block's rows of a result.
  __device__ __forceinline__ auto target(const ForwardOutputs& to) const {
    if constexpr (kFolded) {
      return FoldedTarget<kDType>(to.out, to.out_residual, sequence.query_batch, head, sequence.first_query,
                                  row_numbers());
    } else {
      return RowTarget<kDType>(to.out, to.out_residual, sequence.query_batch, head, sequence.first_query);
    }
  }

  // The scores of the block's rows.
  __device__ __forceinline__ auto tile(const AttentionParams& p) const {
    if constexpr (kFolded) {
      return FoldedTile<T>(p, sequence, head, row_numbers(), rows);
    } else {
      return ScoreTile<T>(p, sequence, head, first_row);
    }
  }

 private:
  static_assert(kRows<T> >= kFewQueries, "a tile holds all queries of a few-query sequence's head");

  __device__ __forceinline__ int rows_from(const AttentionParams& p, const BlockPlace& at) const {
    if (counts_as_few(p, sequence.queries) != kFolded) return 0;
    if (!kFolded) return smaller(limited(sequence.queries - first_row, 0, kRows<T>), kRows<T>);
    const int64_t most = Grid::heads_of_tile(sequence.queries);
    return static_cast<int>(limited(Grid::group_of(p) - at.tile * most, 0, most) * sequence.queries);
  }

  __device__ __forceinline__ Queries queries_from(const View& query) const {
    if constexpr (kFolded) {
      return {query, sequence.query_batch, head, sequence.first_query, row_numbers()};
    } else {
      return {query, sequence.query_batch, head, sequence.first_query};
    }
  }
};

// A block's shared memory. Queries of narrow heads stay there for all keys. Those of wide heads are loaded
// again with every tile of keys, so that several blocks fit on a multiprocessor.
template <DType kDType, bool kFolded>
struct ForwardShared {
  using T = typename Element<kDType>::Accumulation;
  static constexpr int kResidentDims = 64;
  using Plan = ForwardPlan<kDType, kFolded>;
  static constexpr int kPlanBytes = 384;
  static_assert(sizeof(Plan) <= kPlanBytes, "panels begin behind the plan");

  Plan* plan;
  T* columns;  // kColumnPanel: keys, then values
  T* weights;  // kWeightPanel
  T* queries;  // one kRowPanel, or all panels of a narrow head

  __device__ __forceinline__ explicit ForwardShared(unsigned char* memory)
      : plan(reinterpret_cast<Plan*>(memory)),
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

// Turns scores into weights relative to the largest score so far; hidden ones become -0, see is_hidden.
// Earlier sums are multiplied by the factor of the new maximum. state.sum is this thread's share of a row's
// sum.
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

// With kFolded it computes only few-query sequences, and otherwise only the others.
template <DType kDType, bool kFolded>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardOutputs outputs,
                   const SplitLaunch<typename Element<kDType>::Accumulation> split_launch,
                   const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  using Plan = ForwardPlan<kDType, kFolded>;
  SELFATTN_DYNAMIC_SHARED(memory);
  const ForwardShared<kDType, kFolded> shared(memory);
  Plan& plan = *shared.plan;
  if (threadIdx.x == 0) {
    plan = Plan(p, ForwardGrid<T, kFolded>(p, split_launch).place(p, split_launch, first_block + blockIdx.x));
  }
  __syncthreads();
  if (plan.rows == 0) return;
  const Sequence& sequence = plan.sequence;
  const bool has_rows = warp_has_rows<T>(plan.rows);
  const bool partial = kFolded && plan.splits > 1;

  Fragment<T> out[kOutputPanels];
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);
  RowState<T> state[kRowsPerThread<T>];
  if (p.sinks.data != nullptr && !partial) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const int row = min(fragment_row<T>(r), plan.rows - 1);
      const int64_t head = plan.head + plan.row_numbers().of(row).head;
      state[r] = RowState<T>::of_sink(head_scalar<T>(p.sinks, sequence.batch, head));
      if (thread_column() != 0) state[r].sum = T(0);
    }
  }

  const bool resident = ForwardShared<kDType, kFolded>::resident(p.head_dim);
  bool queries_missing = true;
  for (int64_t key = plan.visible.begin / kColumns * kColumns; key < plan.visible.end; key += kColumns) {
    auto tile = plan.tile(p);
    tile.move_to(key);
    if (tile.has_mask() && !__syncthreads_or(has_rows && sees_any<T>(tile))) continue;

    Fragment<T> s;
    clear<T>(s);
    for (int64_t dim = 0; dim < p.head_dim; dim += kDepth<T>) {
      T* const query_panel = shared.queries + (resident ? dim / kDepth<T> * kRowPanel<T> : 0);
      __syncthreads();  // all threads have finished with the panels
      if (queries_missing || !resident) {
        load_transposed<kDType, kRows<T>>(query_panel, plan.queries, plan.first_row,
                                          plan.first_row + plan.rows, dim, p.head_dim);
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
      drop(DropoutPattern<T>(p.dropout, sequence.batch, plan.head), plan.row_numbers(), key, shared.weights);
    }
    __syncwarp();  // only the half-warp that shares rows reads their weights

#pragma unroll
    for (int n = 0; n < kOutputPanels; ++n) {
      const int64_t column = plan.first_column + n * kColumns;
      if (column >= p.value_dim) continue;
      add_weighted<kDType>(shared.weights, shared.columns, RowRange{plan.values, key, plan.visible.end},
                           column, p.value_dim, has_rows, out[n]);
    }
  }

  // Splits leave their states and sums unchanged; merge_splits joins them.
  const int64_t first_statistic = partial
                                      ? split_launch.state(p.heads, sequence.batch, plan.head, 0) + plan.split
                                      : first_statistic_of(p, sequence, plan.head);
  const int64_t query_step = partial ? split_launch.splits : 1;
  const int64_t head_step = partial ? split_launch.queries * split_launch.splits : p.rows_per_head;
  T* const row_max = partial ? split_launch.max : static_cast<T*>(outputs.row_max);
  T* const row_sum = partial ? split_launch.sum : static_cast<T*>(outputs.row_sum);
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    state[r].sum = sum_of_row(state[r].sum);
    const int row = fragment_row<T>(r);
    if (plan.first_column == 0 && thread_column() == 0 && row < plan.rows) {
      const HeadRow at = plan.row_numbers().of(row);
      const int64_t statistic = first_statistic + at.head * head_step + at.query * query_step;
      row_max[statistic] = state[r].max;
      row_sum[statistic] = state[r].sum;
    }
  }
  if constexpr (kFolded) {
    if (partial) {
      View sums;
      sums.data = split_launch.out + first_statistic * p.value_dim;
      sums.stride[1] = head_step * p.value_dim;
      sums.stride[2] = query_step * p.value_dim;
      const FoldedTarget<kAccumulation<T>> target(sums, nullptr, 0, 0, 0, plan.row_numbers());
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) {
        store_fragment<T>(target, 0, plan.rows, plan.first_column + n * kColumns, p.value_dim, out[n]);
      }
      return;
    }
  }
  const auto target = plan.target(outputs);
  T zero = T(0);  // becomes NaN if a result is not finite
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const T inverse = state[r].inverse_sum();
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) {
        out[n][r][c] = normalised(out[n][r][c], inverse);
        zero = multiply_add(out[n][r][c], T(0), zero);
      }
    }
    store_fragment<T>(target, plan.first_row, plan.first_row + plan.rows, plan.first_column + n * kColumns,
                      p.value_dim, out[n]);
  }
  if constexpr (kMayOverflow<kDType>) {
    if (!__syncthreads_or(zero != T(0))) return;
    const int64_t end = smaller(p.value_dim, plan.first_column + kOutputColumns);
    for (int row = static_cast<int>(threadIdx.x) / kWarp; row < plan.rows; row += kThreads / kWarp) {
      const HeadRow at = plan.row_numbers().of(row);
      mend_overflow<kDType>(p, outputs, sequence.batch, plan.head + at.head, at.query, plan.first_column,
                            end);
    }
  }
}

template <DType kDType>
void forward(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const size_t bytes = ForwardShared<kDType, false>::bytes(p.head_dim);
  static_assert(ForwardShared<kDType, false>::kPlanBytes == ForwardShared<kDType, true>::kPlanBytes);
  if (may_have_few_queries(p)) {
    auto split_launch = first_split_launch<T>(p, where.workspace, /*rounds=*/false);
    const bool pairs = writable_by_pairs(p, outputs);
    do {
      launch_blocks_with_function(p.function, &forward_kernel<kDType, true>,
                                  ForwardGrid<T, true>(p, split_launch).blocks(), kThreads, bytes, where, p,
                                  outputs, split_launch);
      if (split_launch.splits > 1) {
        run_merge<kDType>(MergePlan<T>{p, outputs, split_launch, T(1), pairs}, where.stream);
      }
    } while (next_split_launch(p, split_launch));
  }
  if (has_few_queries(p)) return;
  const SplitLaunch<T> none;
  launch_blocks_with_function(p.function, &forward_kernel<kDType, false>,
                              ForwardGrid<T, false>(p, none).blocks(), kThreads, bytes, where, p, outputs,
                              none);
}

}  // namespace selfattn::cuda::simt
