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
  const int64_t block = block_of_grid();
  const int64_t row = block * kMergeRows + (threadIdx.x >> 5);
  if (row >= p.batch * p.heads * p.queries) return;
  const int64_t batch = row / (p.heads * p.queries), head = row / p.queries % p.heads;
  const int64_t first = row * plan.splits;

  RowState<float> state;
  for (int64_t split = 0; split < plan.splits; ++split) {
    state.max = larger(state.max, plan.partial_max[first + split]);
  }
  // Two neighbouring columns of every 64.
  constexpr int kColumns = kMaxDim / 64;
  float sum[kColumns][2] = {};
  float rounding = 0.0f;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int64_t split = 0; split < plan.splits; ++split) {
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
  const float factor = finish_row(plan, batch, head, row, state, rounding, lane == 0);
  const int64_t at = plan.outputs.out.offset(batch, head, row % p.queries);
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int column = n * 64 + lane * 2;
    if (column >= p.value_dim) continue;
    store_results<kDType>(plan, at + column, normalised(sum[n][0], factor), normalised(sum[n][1], factor),
                          column + 1 < p.value_dim);
  }
}

}  // namespace selfattn::cuda::sm80
