// The gradients of queries, keys and values.
//
// A block owns rows of one side, queries of a head or keys of a kv head, and up to kOutputPanels panels of
// their gradients. It computes each tile again from the inputs, so that no memory of size queries x keys is
// needed, and no block adds to another block's sums.
#pragma once

#include "../function/launch_with_function.cuh"
#include "gradient_tile.cuh"
#include "store.cuh"

namespace selfattn::cuda::simt {

// kColumns columns of one of the results. Panels are numbered: those of dQ, or those of dK and then those of
// dV.
template <Side kSide>
struct GradientPanel {
  bool of_values;
  int64_t first_column, columns;  // of the tensor that it belongs to

  __host__ __device__ __forceinline__ GradientPanel(const AttentionParams& p, int64_t index)
      : of_values(kRowsAreKeys<kSide> && index >= divide_up(p.head_dim, kColumns)),
        first_column((of_values ? index - divide_up(p.head_dim, kColumns) : index) * kColumns),
        columns(of_values ? p.value_dim : p.head_dim) {}

  __host__ __device__ __forceinline__ bool exists() const { return first_column < columns; }

  static __host__ __device__ __forceinline__ int64_t count(const AttentionParams& p) {
    return divide_up(p.head_dim, kColumns) + (kRowsAreKeys<kSide> ? divide_up(p.value_dim, kColumns) : 0);
  }
  // The number of blocks that share the same rows.
  static __host__ __device__ __forceinline__ int64_t parts(const AttentionParams& p) {
    return count(p) > 0 ? divide_up(count(p), kOutputPanels) : 1;
  }
};

template <DType kDType>
__device__ __forceinline__ GradientPlan<kDType, Side::kQuery> plan_of_queries(const AttentionParams& p,
                                                                              const BackwardArguments& a,
                                                                              int64_t tile) {
  using Plan = GradientPlan<kDType, Side::kQuery>;
  const HeadTile at(tile, p.heads, p.queries, Plan::kQueries);
  const Sequence sequence = sequence_of(p, at.batch);
  KeyRange visible{0, 0};
  if (at.first_row < sequence.queries) {
    const int rows = smaller(sequence.queries - at.first_row, Plan::kQueries);
    visible = visible_keys(positions_of(p, sequence), at.first_row, at.first_row + rows - 1);
  }
  return Plan(p, a, Span::only(at.batch), Span::only(at.head), Span::only(at.first_row),
              Span::covering(visible.begin, visible.end, Plan::kKeys));
}

// Tiles with the first keys come first, because they have the most work under a causal mask.
template <DType kDType>
__device__ __forceinline__ GradientPlan<kDType, Side::kKey> plan_of_keys(const AttentionParams& p,
                                                                         const BackwardArguments& a,
                                                                         int64_t tile) {
  using Plan = GradientPlan<kDType, Side::kKey>;
  const HeadTile at(tile, p.kv_heads, p.keys, Plan::kKeys);
  const int64_t first_key = (divide_up(p.keys, Plan::kKeys) - 1) * Plan::kKeys - at.first_row;
  const Sequence sequence = sequence_of(p, at.batch);
  QueryRange seeing{0, 0};
  if (first_key < sequence.keys) {
    const int rows = smaller(sequence.keys - first_key, Plan::kKeys);
    seeing = visible_queries(positions_of(p, sequence), first_key, first_key + rows - 1);
  }
  const int64_t group = p.heads / p.kv_heads;
  return Plan(p, a, Span::only(at.batch), {at.head * group, (at.head + 1) * group},
              Span::covering(seeing.begin, seeing.end, Plan::kQueries), Span::only(first_key));
}

// Writes a panel of the block's sums. ds was the gradient of a score, so the gradient of q·k needs the scale.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void store_panel(const AttentionParams& p, const BackwardArguments& a,
                                            const GradientPlan<kDType, kSide>& plan,
                                            const GradientPanel<kSide>& panel, int64_t head,
                                            Fragment<T>& out) {
  const T scale = panel.of_values ? T(1) : static_cast<T>(p.scale);
  for_each_number<T>([&](int r, int c) { out[r][c] *= scale; });
  const View& view = !kRowsAreKeys<kSide> ? a.grad_query : panel.of_values ? a.grad_value : a.grad_key;
  const Span& rows = kRowsAreKeys<kSide> ? plan.keys : plan.queries;
  const Sequence& s = plan.sequence;
  const RowTarget<kDType> target(view, nullptr, kRowsAreKeys<kSide> ? s.key_batch : s.query_batch, head,
                                 kRowsAreKeys<kSide> ? s.first_key : s.first_query);
  store_fragment<T>(target, rows.first, kRowsAreKeys<kSide> ? s.keys : s.queries, panel.first_column,
                    panel.columns, out);
}

template <DType kDType, Side kSide>
__global__ void __launch_bounds__(kThreads, 2)
    gradient_kernel(const AttentionParams p, const BackwardArguments a,
                    const rows::RowGradients<typename Element<kDType>::Accumulation> rows,
                    const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const GradientShared<kDType, kSide> shared(memory);
  GradientPlan<kDType, kSide>& plan = *shared.plan;
  if (threadIdx.x == 0) {
    const int64_t block = first_block + blockIdx.x, parts = GradientPanel<kSide>::parts(p);
    if constexpr (kRowsAreKeys<kSide>) {
      plan = plan_of_keys<kDType>(p, a, block / parts);
    } else {
      plan = plan_of_queries<kDType>(p, a, block / parts);
    }
    plan.first_panel = static_cast<int>(block % parts) * kOutputPanels;
  }
  const bool sums_slopes = kSide == Side::kQuery && a.grad_slopes_rows != nullptr;
  if (sums_slopes && thread_column() == 0) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) shared.row_sums[fragment_row<T>(r)] = T(0);
  }
  __syncthreads();

  // The block has one batch element, and so one sequence, whichever tile the plan is at.
  const Sequence& sequence = plan.sequence;
  const int64_t rows_left =
      kRowsAreKeys<kSide> ? sequence.keys - plan.keys.first : sequence.queries - plan.queries.first;
  if (rows_left <= 0) return;  // only a longer sequence has these rows
  const bool has_rows = warp_has_rows<T>(smaller(rows_left, kRows<T>));
  const bool needs_score_grads = !GradientPanel<kSide>(p, plan.first_panel).of_values;
  Fragment<T> out[kOutputPanels];
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);

  for (; !plan.done(); move_on(plan, p, a)) {
    if (!gradient_tile<kDType, kSide>(p, a, rows, shared, has_rows, needs_score_grads)) continue;
#pragma unroll
    for (int n = 0; n < kOutputPanels; ++n) {
      const GradientPanel<kSide> panel(p, plan.first_panel + n);
      if (!panel.exists()) continue;
      if constexpr (kRowsAreKeys<kSide>) {
        add_weighted<kDType>(
            panel.of_values ? shared.weights : shared.score_grads, shared.columns,
            RowRange{panel.of_values ? plan.grad_rows : plan.query_rows, plan.first_query, sequence.queries},
            panel.first_column, panel.columns, has_rows, out[n]);
      } else {
        add_weighted<kDType>(shared.score_grads, shared.columns,
                             RowRange{plan.key_rows, plan.first_key, plan.keys.end}, panel.first_column,
                             panel.columns, has_rows, out[n]);
      }
    }
  }

  const int64_t head = kRowsAreKeys<kSide> ? p.kv_head(plan.heads.first) : plan.heads.first;
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) {
    const GradientPanel<kSide> panel(p, plan.first_panel + n);
    if (panel.exists()) store_panel<kDType, kSide, T>(p, a, plan, panel, head, out[n]);
  }
  if (sums_slopes && plan.first_panel == 0 && thread_column() == 0) {
    const int64_t first = first_statistic_of(p, sequence, head) + plan.queries.first;
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const int row = fragment_row<T>(r);
      if (row < rows_left) static_cast<T*>(a.grad_slopes_rows)[first + row] = shared.row_sums[row];
    }
  }
}

// `where.workspace` begins with the row gradients.
template <DType kDType>
void backward(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const rows::RowGradients<T> rows = rows::row_gradients_in<T>(where.workspace, p);
  const int64_t query_blocks =
      p.batch * p.heads * divide_up(p.queries, kRows<T>) * GradientPanel<Side::kQuery>::parts(p);
  launch_blocks_with_function(p.function, &gradient_kernel<kDType, Side::kQuery>, query_blocks, kThreads,
                              GradientShared<kDType, Side::kQuery>::kBytes, where, p, a, rows);
  const int64_t key_blocks =
      p.batch * p.kv_heads * divide_up(p.keys, kRows<T>) * GradientPanel<Side::kKey>::parts(p);
  launch_blocks_with_function(p.function, &gradient_kernel<kDType, Side::kKey>, key_blocks, kThreads,
                              GradientShared<kDType, Side::kKey>::kBytes, where, p, a, rows);
}

}  // namespace selfattn::cuda::simt
