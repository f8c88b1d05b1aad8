// The gradient of a float mask: ds summed over the dimensions that share the mask, rounded once.
//
// mask/mask_regions.h says what a block owns, and which tiles it adds up.
#pragma once

#include "../function/launch_with_function.cuh"
#include "../mask/line_totals.cuh"
#include "gradient_tile.cuh"

namespace selfattn::cuda::simt {

template <DType kDType>
__device__ __forceinline__ GradientPlan<kDType, Side::kMask> plan_of_mask(const AttentionParams& p,
                                                                          const BackwardArguments& a,
                                                                          const MaskRegions& regions,
                                                                          int64_t block) {
  using Plan = GradientPlan<kDType, Side::kMask>;
  const MaskRegions::Tile at = regions.region(block / regions.splits);
  Plan plan(p, a, regions.kept[0] ? Span::only(at.batch) : Span{0, p.batch},
            regions.kept[1] ? Span::only(at.head) : Span{0, p.heads},
            regions.kept[2] ? Span::only(at.row_tile * Plan::kQueries) : Span{0, p.queries},
            regions.kept[3] ? Span::only(at.column_tile * Plan::kKeys) : Span{0, p.keys});
  plan.skip(p, a, block % regions.splits * regions.split_items);
  plan.left = min(plan.left, regions.split_items);
  while (!plan.done() && !plan.in_window(p)) plan.step(p, a);
  return plan;
}

// Stores one element of a region, if the tensor has it.
template <DType kDType>
__device__ __forceinline__ void store_mask_gradient(const AttentionParams& p, const View& grad_mask,
                                                    const MaskRegions::Tile& at, int row, int column,
                                                    double sum) {
  using Plan = GradientPlan<kDType, Side::kMask>;
  const int64_t query = at.row_tile * Plan::kQueries + row, key = at.column_tile * Plan::kKeys + column;
  if (query >= p.queries || key >= p.keys) return;
  const int64_t index = grad_mask.offset(at.batch, at.head, query) + key * grad_mask.stride[3];
  store_element(grad_mask.data, grad_mask.dtype, index, sum);
}

// The work of a block: adds up the tiles of its split of a region. compute_tile() leaves ds of the plan's
// tile in shared.score_grads; it returns false, and leaves nothing there, if the mask hides all of the tile.
template <DType kDType, class ComputeTile>
__device__ __forceinline__ void add_up_mask(const AttentionParams& p, const BackwardArguments& a,
                                            const MaskRegions& regions, int64_t block,
                                            const GradientShared<kDType, Side::kMask>& shared,
                                            const ComputeTile& compute_tile) {
  using T = typename Element<kDType>::Accumulation;
  GradientPlan<kDType, Side::kMask>& plan = *shared.plan;
  if (threadIdx.x == 0) plan = plan_of_mask<kDType>(p, a, regions, block);
  __syncthreads();

  const LineTotals totals(regions, shared.totals);
  const auto element_of_sums = [&](int row, int column) {
    return shared.weights[panel_index<T, kRows<T>>(column, row)];
  };

  Fragment<T> sums;
  clear<T>(sums);
  int tiles = 0;  // how many are in `sums`
  while (!plan.done()) {
    if (compute_tile()) {
      Fragment<T> grad;
      get_fragment<T>(shared.score_grads, grad);
      for_each_number<T>([&](int r, int c) { sums[r][c] += grad[r][c]; });
      ++tiles;
    }
    move_on(plan, p, a);
    if (!regions.is_tile() && (tiles == LineTotals::kTiles || plan.done())) {
      put_fragment<T>(shared.weights, sums);
      clear<T>(sums);
      tiles = 0;
      __syncthreads();
      totals.add(element_of_sums);  // threads wait for each other again before the next tile's weights
    }
  }

  if (regions.is_tile()) {
    put_fragment<T>(shared.weights, sums);
    __syncthreads();
  }
  totals.finish();
  const MaskRegions::Tile at = regions.region(block / regions.splits);
  const int elements = regions.rows() * regions.columns();
#pragma unroll 1
  for (int element = static_cast<int>(threadIdx.x); element < elements; element += kThreads) {
    const int row = element / regions.columns(), column = element % regions.columns();
    const double sum =
        regions.is_tile() ? static_cast<double>(element_of_sums(row, column)) : totals.element(element);
    if (regions.splits > 1) {
      regions.partial[block * elements + element] = sum;
    } else {
      store_mask_gradient<kDType>(p, a.grad_mask, at, row, column, sum);
    }
  }
}

// The blocks that share a multiprocessor. Its registers are enough for three; with float64 they would spill.
template <DType kDType>
constexpr int kMaskBlocks = kDType == DType::kFloat64 ? 2 : 3;

template <DType kDType>
__global__ void __launch_bounds__(kThreads, kMaskBlocks<kDType>)
    mask_gradient_kernel(const AttentionParams p, const BackwardArguments a,
                         const rows::RowGradients<typename Element<kDType>::Accumulation> rows,
                         const MaskRegions regions, const int64_t first_block) {
  SELFATTN_DYNAMIC_SHARED(memory);
  const GradientShared<kDType, Side::kMask> shared(memory);
  add_up_mask<kDType>(p, a, regions, first_block + blockIdx.x, shared,
                      [&] { return gradient_tile<kDType, Side::kMask>(p, a, rows, shared, true, true); });
}

// `partial` is the memory where splits leave their sums.
template <DType kDType>
MaskRegions regions_of_mask(const AttentionParams& p, const BackwardArguments& a, void* partial = nullptr) {
  using Plan = GradientPlan<kDType, Side::kMask>;
  MaskRegions regions = mask_regions(p, a, Plan::kQueries, Plan::kKeys);
  if (regions.splits > 1) regions.partial = static_cast<double*>(partial);
  return regions;
}

template <DType kDType>
size_t mask_workspace(const AttentionParams& p, const BackwardArguments& a) {
  return mask_partial_bytes(regions_of_mask<kDType>(p, a));
}

// `where.workspace` begins with the row gradients; the sums of splits follow.
template <DType kDType>
void mask_gradient(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  char* const workspace = static_cast<char*>(where.workspace);
  const MaskRegions regions = regions_of_mask<kDType>(p, a, workspace + rows::row_gradients_bytes(p));
  launch_blocks_with_function(p.function, &mask_gradient_kernel<kDType>, regions.blocks(), kThreads,
                              GradientShared<kDType, Side::kMask>::kBytes, where, p, a,
                              rows::row_gradients_in<T>(where.workspace, p), regions);
  join_mask_splits(p, a, regions, where);
}

}  // namespace selfattn::cuda::simt
