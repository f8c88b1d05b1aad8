// Forward mode, from the statistics of a forward that has run, and second derivatives.
//
// See Note [Second derivatives] in core/tangents.h. Blocks own rows and panels of results, like those of the
// backward.
#pragma once

#include "backward.cuh"
#include "simt.h"
#include "tangent_tile.cuh"

namespace selfattn::cuda::simt {

// The panels are those of the gradients, except that kOut has panels of the output's tangent, and kMean none.
template <Side kSide>
__device__ __forceinline__ GradientPanel<kSide> panel_of_step(const AttentionParams& p, TangentStep step,
                                                              int64_t index) {
  GradientPanel<kSide> panel(p, index);
  if (step == TangentStep::kGradient) return panel;
  panel.of_values = true;
  panel.columns = step == TangentStep::kOut ? p.value_dim : 0;
  return panel;
}

// The number of blocks that share the same rows.
template <Side kSide>
__host__ __device__ __forceinline__ int64_t parts_of_step(const AttentionParams& p, TangentStep step) {
  if (step == TangentStep::kGradient) return GradientPanel<kSide>::parts(p);
  return step == TangentStep::kOut && p.value_dim > 0 ? divide_up(p.value_dim, kOutputColumns) : 1;
}

// Adds the tile's products to a panel of the result: those with inputs if `of` is 0, with their tangents if
// it is 1.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void add_to_panel(const AttentionParams& p, const BackwardBackwardArguments& a,
                                             const TangentShared<kDType, kSide>& shared,
                                             const GradientPanel<kSide>& panel, int of, bool has_rows,
                                             Fragment<T>& out) {
  const GradientPlan<kDType, kSide>& plan = *shared.plan;
  const Sequence& s = plan.sequence;
  const T* left = of == 0 ? shared.weights : shared.score_grads;
  if constexpr (kRowsAreKeys<kSide>) {
    // dV is a product with dO alone.
    if (panel.of_values && of == 1) return;
    if (panel.of_values) left = shared.deviations;
    const View& view = panel.of_values ? a.backward.grad_out : of == 0 ? p.query : a.tangents.query;
    if (view.data == nullptr) return;
    const RowSource<kDType> queries(view, s.query_batch, plan.head, s.first_query);
    add_weighted<kDType>(left, shared.columns, RowRange{queries, plan.first_query, s.queries},
                         panel.first_column, panel.columns, has_rows, out);
  } else {
    const View& view =
        panel.of_values ? (of == 0 ? p.value : a.tangents.value) : (of == 0 ? p.key : a.tangents.key);
    if (view.data == nullptr) return;
    const KeyRows<kDType> keys(view, p.pages, s, p.kv_head(plan.head));
    add_weighted<kDType>(left, shared.columns, RowRange{keys, plan.first_key, plan.keys.end},
                         panel.first_column, panel.columns, has_rows, out);
  }
}

// Finishes a row after all its keys, and adds the share of its sink, a score without a value.
template <class T>
__device__ __forceinline__ void finish_row(const AttentionParams& p, const BackwardBackwardArguments& a,
                                           const TangentRows<T>& rows, TangentStep step, int64_t batch,
                                           int64_t head, int64_t row, T sum) {
  if (step == TangentStep::kGradient) {
    if (a.backward.grad_slopes_rows != nullptr) static_cast<T*>(a.backward.grad_slopes_rows)[row] = sum;
    return;
  }
  const TangentNumbers<T> numbers(rows, step, row);
  const T weight = p.sinks.data != nullptr ? numbers.weight(head_scalar<T>(p.sinks, batch, head)) : T(0);
  const T tangent = a.tangents.sinks.data != nullptr ? head_scalar<T>(a.tangents.sinks, batch, head) : T(0);
  if (step == TangentStep::kMean) {
    rows.mean[row] = weight == T(0) ? sum : multiply_add(weight, tangent, sum);
  } else if (rows.correction != nullptr) {
    const T of_sink = -numbers.delta * tangent;
    const T correction = weight == T(0) ? sum : multiply_add(weight, of_sink, sum);
    rows.correction[row] = correction;
    if (a.backward.grad_sinks_rows != nullptr) {
      static_cast<T*>(a.backward.grad_sinks_rows)[row] =
          weight == T(0) ? T(0) : weight * (of_sink - correction);
    }
  }
}

// Steps of queries write their result to BackwardArguments::grad_query.
template <DType kDType, Side kSide>
__global__ void __launch_bounds__(kThreads, 2)
    tangent_kernel(const __grid_constant__ AttentionParams p,
                   const __grid_constant__ BackwardBackwardArguments a,
                   const TangentRows<typename Element<kDType>::Accumulation> rows, const TangentStep step,
                   const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const TangentShared<kDType, kSide> shared(memory);
  GradientPlan<kDType, kSide>& plan = *shared.plan;
  if (threadIdx.x == 0) {
    const int64_t block = first_block + blockIdx.x, parts = parts_of_step<kSide>(p, step);
    if constexpr (kRowsAreKeys<kSide>) {
      plan = plan_of_keys<kDType>(p, a.backward, block / parts);
    } else {
      plan = plan_of_queries<kDType>(p, a.backward, block / parts);
    }
    plan.first_panel = static_cast<int>(block % parts) * kOutputPanels;
  }
  if (thread_column() == 0) {
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
  // Of the blocks that share queries, the first computes the rows' sums.
  const bool finishes_rows = kSide == Side::kQuery && plan.first_panel == 0;
  const bool needs_score_grads = step == TangentStep::kGradient
                                     ? !GradientPanel<kSide>(p, plan.first_panel).of_values
                                     : step == TangentStep::kOut && finishes_rows;
  Fragment<T> out[kOutputPanels];
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);

  for (; !plan.done(); move_on(plan, p, a.backward)) {
    if (!tangent_tile<kDType, kSide>(p, a, rows, step, shared, has_rows, needs_score_grads)) continue;
#pragma unroll 1
    for (int of = 0; of < 2; ++of) {
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) {
        const GradientPanel<kSide> panel = panel_of_step<kSide>(p, step, plan.first_panel + n);
        if (panel.exists()) add_to_panel<kDType, kSide>(p, a, shared, panel, of, has_rows, out[n]);
      }
    }
  }

  const int64_t head = kRowsAreKeys<kSide> ? p.kv_head(plan.heads.first) : plan.heads.first;
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) {
    const GradientPanel<kSide> panel = panel_of_step<kSide>(p, step, plan.first_panel + n);
    if (panel.exists()) store_panel<kDType, kSide, T>(p, a.backward, plan, panel, head, out[n]);
  }
  if (finishes_rows && thread_column() == 0) {
    const int64_t first = first_statistic_of(p, sequence, head) + plan.queries.first;
#pragma unroll 1
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
      const int row = fragment_row<T>(r);
      if (row >= rows_left) break;
      finish_row<T>(p, a, rows, step, sequence.batch, head, first + row, shared.row_sums[row]);
    }
  }
}

template <DType kDType, Side kSide, class T>
void launch_tangents(const AttentionParams& p, const BackwardBackwardArguments& a, const TangentRows<T>& rows,
                     TangentStep step, const Launch& where) {
  const int64_t tiles = kRowsAreKeys<kSide> ? p.kv_heads * divide_up(p.keys, kRows<T>)
                                            : p.heads * divide_up(p.queries, kRows<T>);
  launch_blocks(&tangent_kernel<kDType, kSide>, p.batch * tiles * parts_of_step<kSide>(p, step), kThreads,
                TangentShared<kDType, kSide>::kBytes, where, p, a, rows, step);
}

// Computes the tangents of out and lse, and for second derivatives also the correction.
template <DType kDType, class T>
void tangents_of_results(const AttentionParams& p, BackwardBackwardArguments a, const TangentRows<T>& rows,
                         const Launch& where) {
  a.backward.grad_query = a.tangent_out;
  launch_tangents<kDType, Side::kQuery>(p, a, rows, TangentStep::kMean, where);
  launch_tangents<kDType, Side::kQuery>(p, a, rows, TangentStep::kOut, where);
}

template <DType kDType>
void jvp(const AttentionParams& p, const JvpArguments& given, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  BackwardBackwardArguments a;
  a.tangents = given.tangents;
  a.tangent_out = given.tangent_out;
  const TangentRows<T> rows{static_cast<const T*>(given.forward.row_max),
                            static_cast<const T*>(given.forward.row_sum), static_cast<T*>(given.tangent_lse),
                            nullptr, nullptr};
  tangents_of_results<kDType>(p, a, rows, where);
}

// `where.workspace` has tangent_rows_bytes(): the row gradients, then the corrections.
template <DType kDType>
TangentRows<typename Element<kDType>::Accumulation> tangent_rows_of(const AttentionParams& p,
                                                                    const BackwardBackwardArguments& a,
                                                                    const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  return {static_cast<const T*>(a.backward.row_max), static_cast<const T*>(a.backward.row_sum),
          static_cast<T*>(a.tangent_lse), rows::row_gradients_in<T>(where.workspace, p).delta,
          reinterpret_cast<T*>(static_cast<char*>(where.workspace) + rows::row_gradients_bytes(p))};
}

template <DType kDType>
void backward_backward(const AttentionParams& p, const BackwardBackwardArguments& a, const Launch& where) {
  const auto rows = tangent_rows_of<kDType>(p, a, where);
  tangents_of_results<kDType>(p, a, rows, where);
  launch_tangents<kDType, Side::kQuery>(p, a, rows, TangentStep::kGradient, where);
  launch_tangents<kDType, Side::kKey>(p, a, rows, TangentStep::kGradient, where);
}

}  // namespace selfattn::cuda::simt
