// The forward of selected keys: online softmax over the keys of a list.
//
// A block owns queries that share a list, of all heads that share it and a kv head as far as a tile holds
// them, and up to kOutputColumns columns of the values.
#pragma once

#include "forward.cuh"
#include "selected_tile.cuh"

namespace selfattn::cuda::simt {

// Turns scores into the weights of rows whose states are known; hidden ones become -0.
template <class T>
__device__ __forceinline__ void weigh_finally(Fragment<T>& s, const RowState<T> (&state)[kRowsPerThread<T>]) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    const T inverse = state[r].inverse_sum();
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      s[r][c] = s[r][c] == -infinity<T>() ? -T(0) : state[r].weight(s[r][c], inverse);
    }
  }
}

// Multiplies the thread's weights by 0 or 1/(1 - probability).
template <class T>
__device__ __forceinline__ void drop_listed(const DropoutPattern<T>& pattern,
                                            const SelectedShared<T>& shared) {
#pragma unroll 1
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    DropoutOfQuery<T> dropout(pattern, shared.rows[fragment_row<T>(r)]);
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      const int64_t key = shared.columns[fragment_column<T>(c)].number;
      shared.weights[weight_index<T>(r, c)] *= dropout.factor(key);
    }
  }
}

// The work of a block. It lies in shared memory behind the panels, so that it takes no registers.
template <DType kDType>
struct SelectedPlan {
  QueryTile<typename Element<kDType>::Accumulation> at;
  ListedKeys listed;
  ListedRows<kDType> queries;
  ListedRows<kDType, KeyRows<kDType>> keys, values;

  __device__ __forceinline__ SelectedPlan(const AttentionParams& p, int64_t tile, const TileLine* rows,
                                          const TileLine* columns)
      : at(p, tile),
        listed(at.listed_keys(p)),
        queries(rows, p.query, at.sequence.query_batch, at.head, at.sequence.first_query),
        keys(columns, p.key, p.pages, at.sequence, p.kv_head(at.head)),
        values(columns, p.value, p.pages, at.sequence, p.kv_head(at.head)) {}
};

template <DType kDType, class T = typename Element<kDType>::Accumulation>
constexpr size_t kSelectedForwardBytes = SelectedShared<T>::kBytes + sizeof(SelectedPlan<kDType>);

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 2)
    selected_forward_kernel(const __grid_constant__ AttentionParams p,
                            const __grid_constant__ ForwardOutputs outputs, const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const SelectedShared<T> shared(memory);
  const int64_t block = first_block + blockIdx.x;
  const int64_t parts = p.value_dim > 0 ? divide_up(p.value_dim, kOutputColumns) : 1;
  const int64_t first_column = block % parts * kOutputColumns;
  static_assert(SelectedShared<T>::kBytes % alignof(SelectedPlan<kDType>) == 0, "the plan is aligned");
  auto& plan = *reinterpret_cast<SelectedPlan<kDType>*>(memory + SelectedShared<T>::kBytes);
  if (threadIdx.x == 0) plan = SelectedPlan<kDType>(p, block / parts, shared.rows, shared.columns);
  __syncthreads();
  const QueryTile<T>& at = plan.at;
  if (at.rows == 0) return;
  const Sequence& sequence = at.sequence;
  fill_lines<kRows<T>>(shared.rows, [&](int row) { return at.line(row); });
  __syncthreads();
  const bool has_rows = warp_has_rows<T>(at.rows);
  const SelectedScores<T> scores(p, sequence, at.head, shared.rows, shared.columns);

  RowState<T> state[kRowsPerThread<T>];
  if (p.sinks.data != nullptr) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const int64_t head = at.head + shared.rows[fragment_row<T>(r)].head;
      state[r] = RowState<T>::of_sink(head_scalar<T>(p.sinks, sequence.batch, head));
      if (thread_column() != 0) state[r].sum = T(0);
    }
  }

  // Rows whose sums overflow are computed again, with weights that are divided by their sum first: see
  // ../common/overflow.cuh. All other rows have lost their lines by then.
  for (bool again = false;; again = true) {
    Fragment<T> out[kOutputPanels];
#pragma unroll
    for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);
    for (int64_t first = plan.listed.begin; first < plan.listed.end; first += kColumns) {
      const int columns = smaller(plan.listed.end - first, kColumns);
      __syncthreads();  // all threads have finished with the columns
      fill_lines<kColumns>(shared.columns, [&](int column) { return plan.listed.line(first + column); });
      __syncthreads();
      Fragment<T> s;
      multiply_listed<kDType>(shared, plan.queries, at.rows, plan.keys, columns, p.head_dim, has_rows, s);
      finish_scores(scores, shared.weights, s);
      if (again) {
        weigh_finally<T>(s, state);
      } else {
        weigh<T>(s, state, out);
      }
      put_fragment<T>(shared.weights, s);
      if (p.dropout.enabled) drop_listed(DropoutPattern<T>(p.dropout, sequence.batch, at.head), shared);
      __syncwarp();  // only the half-warp that shares rows reads their weights
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) {
        const int64_t column = first_column + n * kColumns;
        if (column >= p.value_dim) continue;
        add_weighted<kDType>(shared.weights, shared.column_panel, RowRange{plan.values, 0, columns}, column,
                             p.value_dim, has_rows, out[n]);
      }
    }

    T zero[kRowsPerThread<T>];  // becomes NaN if a result is not finite
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      zero[r] = T(0);
      if (again) continue;
      state[r].sum = sum_of_row(state[r].sum);
      const T inverse = state[r].inverse_sum();
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) {
#pragma unroll
        for (int c = 0; c < kColumnsPerThread; ++c) {
          out[n][r][c] = normalised(out[n][r][c], inverse);
          zero[r] = multiply_add(out[n][r][c], T(0), zero[r]);
        }
      }
      const int row = fragment_row<T>(r);
      if (first_column == 0 && thread_column() == 0 && row < at.rows) {
        const TileLine query = shared.rows[row];
        const int64_t statistic = first_statistic_of(p, sequence, at.head + query.head) + query.number;
        static_cast<T*>(outputs.row_max)[statistic] = state[r].max;
        static_cast<T*>(outputs.row_sum)[statistic] = state[r].sum;
      }
    }
    const ListedTarget<kDType> target(shared.rows, outputs.out, outputs.out_residual, sequence.query_batch,
                                      at.head, sequence.first_query);
#pragma unroll
    for (int n = 0; n < kOutputPanels; ++n) {
      store_fragment<T>(target, 0, at.rows, first_column + n * kColumns, p.value_dim, out[n]);
    }
    if constexpr (!kMayOverflow<kDType>) return;
    bool any = false;
    T sums[kRowsPerThread<T>];
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      sums[r] = sum_of_row(zero[r]);
      any = any || sums[r] != T(0);
    }
    if (!__syncthreads_or(any)) return;
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      if (sums[r] == T(0) && thread_column() == 0) shared.rows[fragment_row<T>(r)].number = -1;
    }
  }
}

template <DType kDType>
void selected_forward(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const int64_t parts = p.value_dim > 0 ? divide_up(p.value_dim, kOutputColumns) : 1;
  launch_blocks(&selected_forward_kernel<kDType>, QueryTiles<T>(p).count(p) * parts, kThreads,
                kSelectedForwardBytes<kDType>, where, p, outputs);
}

}  // namespace selfattn::cuda::simt
