// Joins the splits of thin calls, in their order.
#pragma once

#include "../common/grid.cuh"
#include "epilogue.cuh"

namespace selfattn::cuda::sm80 {

constexpr int kMergeRows = 4;  // of a block, one for each warp
constexpr int kMergeThreads = 32 * kMergeRows;

template <DType kDType>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const Plan plan) {
  const AttentionParams& p = plan.params;
  const int64_t row = block_of_grid() * kMergeRows + (threadIdx.x >> 5);
  const int64_t unit = row / plan.partial_queries, query = row % plan.partial_queries;
  if (unit >= plan.batches * p.heads) return;
  const int64_t batch = plan.first_batch + unit / p.heads, head = unit % p.heads;
  const Sequence sequence = sequence_of(p, batch);
  const int splits = splits_of(static_cast<int>(sequence.keys)).count;
  if (query >= sequence.queries || sequence.queries > kThinQueries || splits == 1) return;
  const int64_t first = partial_state(plan, batch, head, query);

  RowState<float> state;
  for (int split = 0; split < splits; ++split) {
    state.max = larger(state.max, plan.partial_max[first + split]);
  }
  // Two neighbouring columns of every 64.
  constexpr int kColumns = kMaxDim / 64;
  float sum[kColumns][2] = {};
  float rounding = 0.0f;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int split = 0; split < splits; ++split) {
    const float factor = exponential(plan.partial_max[first + split] - state.shift());
    state.sum += factor * plan.partial_sum[first + split];
    rounding += factor * plan.partial_rounding[first + split];
    const float* partial = plan.partial_out + (first + split) * p.value_dim;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int column = n * 64 + lane * 2;
      if (column < p.value_dim) sum[n][0] = fmaf(factor, partial[column], sum[n][0]);
      if (column + 1 < p.value_dim) sum[n][1] = fmaf(factor, partial[column + 1], sum[n][1]);
    }
  }
  const float factor = finish_row(plan, batch, head, first_statistic_of(p, sequence, head) + query, state,
                                  rounding, lane == 0);
  const int64_t at = plan.outputs.out.offset(batch, head, sequence.first_query + query);
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int column = n * 64 + lane * 2;
    if (column >= p.value_dim) continue;
    store_results<kDType>(plan, at + column, normalised(sum[n][0], factor), normalised(sum[n][1], factor),
                          column + 1 < p.value_dim);
  }
}

}  // namespace selfattn::cuda::sm80
