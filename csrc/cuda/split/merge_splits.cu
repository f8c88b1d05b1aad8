// The kernel that joins the splits of few-query sequences.
#include "merge_splits.h"

#include "../common/grid.cuh"
#include "../common/overflow.cuh"
#include "../common/sequence.cuh"
#include "row_results.cuh"

namespace selfattn::cuda {

namespace {

constexpr int kMergeRows = 4;  // of a block, one for each warp
constexpr int kMergeThreads = kWarp * kMergeRows;
constexpr int kMergeColumns = 256;  // columns of the values for each warp

int64_t column_parts(const AttentionParams& p) {
  return p.value_dim > 0 ? divide_up(p.value_dim, kMergeColumns) : 1;
}

template <DType kDType, class T>
__global__ void __launch_bounds__(kMergeThreads, 3)
    merge_kernel(const __grid_constant__ MergePlan<T> plan, const int64_t parts, const int64_t warps) {
  const AttentionParams& p = plan.params;
  const SplitLaunch<T>& split_launch = plan.split_launch;
  const int64_t warp = block_of_grid() * kMergeRows + threadIdx.x / kWarp;
  if (warp >= warps) return;
  const int64_t first_column = warp % parts * kMergeColumns, row = warp / parts;
  const int64_t unit = row / split_launch.queries, query = row % split_launch.queries;
  const int64_t batch = split_launch.first_batch + unit / p.heads, head = unit % p.heads;
  const Sequence sequence = sequence_of(p, batch);
  const int splits = splits_of(sequence.keys).count;
  if (query >= sequence.queries || sequence.queries > kFewQueries || splits == 1) return;
  const int64_t first = split_launch.state(p.heads, batch, head, query);

  RowState<T> state;
  for (int split = 0; split < splits; ++split) state.max = larger(state.max, split_launch.max[first + split]);
  // A lane has two neighbouring columns of every 64.
  constexpr int kPairs = kMergeColumns / (2 * kWarp);
  T sum[kPairs][2] = {};
  T rounding = T(0);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int columns = static_cast<int>(limited(p.value_dim - first_column, 0, kMergeColumns));
  for (int split = 0; split < splits; ++split) {
    const T factor = exponential(split_launch.max[first + split] - state.shift());
    state.sum += factor * split_launch.sum[first + split];
    if (split_launch.rounding != nullptr) rounding += factor * split_launch.rounding[first + split];
    const T* partial = split_launch.out + (first + split) * p.value_dim + first_column;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int column = (n * kWarp + lane) * 2;
      if (column < columns) sum[n][0] = multiply_add(factor, partial[column], sum[n][0]);
      if (column + 1 < columns) sum[n][1] = multiply_add(factor, partial[column + 1], sum[n][1]);
    }
  }
  const T factor = finish_row(plan, batch, head, first_statistic_of(p, sequence, head) + query, state,
                              rounding, lane == 0 && first_column == 0);
  const View& out = plan.outputs.out;
  const int64_t at = out.offset(sequence.query_batch, head, sequence.first_query + query) + first_column;
  bool finite = true;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int column = (n * kWarp + lane) * 2;
    if (column >= columns) continue;
    const T x = normalised(sum[n][0], factor), y = normalised(sum[n][1], factor);
    finite = finite && is_finite_number(x + y);
    store_results<kDType>(plan, at + column, x, y, column + 1 < columns);
  }
  if constexpr (kMayOverflow<kDType>) {
    if (__all_sync(kWholeWarp, finite)) return;
    __syncwarp();
    mend_overflow<kDType>(p, plan.outputs, batch, head, query, first_column, first_column + columns);
  }
}

}  // namespace

template <DType kDType, class T>
void run_merge(const MergePlan<T>& plan, cudaStream_t stream) {
  const AttentionParams& p = plan.params;
  const int64_t parts = column_parts(p),
                warps = plan.split_launch.batches * p.heads * plan.split_launch.queries * parts;
  launch(&merge_kernel<kDType, T>, grid_of(divide_up(warps, kMergeRows)), dim3(kMergeThreads), 0, stream,
         plan, parts, warps);
}

template void run_merge<DType::kFloat64>(const MergePlan<double>&, cudaStream_t);
template void run_merge<DType::kFloat32>(const MergePlan<float>&, cudaStream_t);
template void run_merge<DType::kBFloat16>(const MergePlan<float>&, cudaStream_t);
template void run_merge<DType::kFloat16>(const MergePlan<float>&, cudaStream_t);

}  // namespace selfattn::cuda
