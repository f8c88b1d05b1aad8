// The second derivative with respect to a float mask: sums like its gradient, of tangent tiles.
#pragma once

#include "mask_gradient.cuh"
#include "tangents.cuh"

namespace selfattn::cuda::simt {

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 2)
    tangent_mask_kernel(const __grid_constant__ AttentionParams p,
                        const __grid_constant__ BackwardBackwardArguments a,
                        const TangentRows<typename Element<kDType>::Accumulation> rows,
                        const MaskRegions regions, const int64_t first_block) {
  SELFATTN_DYNAMIC_SHARED(memory);
  const TangentShared<kDType, Side::kMask> shared(memory);
  add_up_mask<kDType>(p, a.backward, regions, first_block + blockIdx.x, shared, [&] {
    return tangent_tile<kDType, Side::kMask>(p, a, rows, TangentStep::kGradient, shared, true, true);
  });
}

// `where.workspace` begins with that of backward_backward(); the sums of splits follow.
template <DType kDType>
void tangent_mask(const AttentionParams& p, const BackwardBackwardArguments& a, const Launch& where) {
  char* const workspace = static_cast<char*>(where.workspace);
  const MaskRegions regions = regions_of_mask<kDType>(p, a.backward, workspace + tangent_rows_bytes(p));
  launch_blocks(&tangent_mask_kernel<kDType>, regions.blocks(), kThreads,
                TangentShared<kDType, Side::kMask>::kBytes, where, p, a, tangent_rows_of<kDType>(p, a, where),
                regions);
  join_mask_splits(p, a.backward, regions, where);
}

}  // namespace selfattn::cuda::simt
