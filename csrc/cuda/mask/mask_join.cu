// Adds up the sums that splits of a mask's gradient have left.
#include <algorithm>

#include "../../core/integers.h"
#include "../common/device.cuh"
#include "mask_regions.h"

namespace selfattn::cuda {

namespace {

constexpr int kThreads = 128;

// A thread adds up one element of a region after the other.
__global__ void __launch_bounds__(kThreads, 4)
    join_mask_kernel(const MaskRegions regions, const View gradient, int64_t queries, int64_t keys) {
  const int64_t of_region = static_cast<int64_t>(regions.rows()) * regions.columns();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; n < regions.regions * of_region;
       n += step) {
    const int64_t region = n / of_region, element = n % of_region;
    const MaskRegions::Tile corner = regions.region(region);
    const int64_t query = corner.row_tile * regions.tile_rows + element / regions.columns();
    const int64_t key = corner.column_tile * regions.tile_columns + element % regions.columns();
    if (query >= queries || key >= keys) continue;
    const double* partial = regions.partial + region * regions.splits * of_region + element;
    double sum = 0.0;
    for (int64_t split = 0; split < regions.splits; ++split) sum += partial[split * of_region];
    store_element(gradient.data, gradient.dtype,
                  gradient.offset(corner.batch, corner.head, query) + key * gradient.stride[3], sum);
  }
}

}  // namespace

void join_mask_splits(const AttentionParams& p, const BackwardArguments& a, const MaskRegions& regions,
                      const Launch& where) {
  if (regions.splits == 1 || regions.blocks() == 0) return;
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t blocks =
      std::min(divide_up(regions.regions * regions.rows() * regions.columns(), kThreads), kMostBlocks);
  launch(&join_mask_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, where.stream, regions,
         a.grad_mask, p.queries, p.keys);
}

}  // namespace selfattn::cuda
