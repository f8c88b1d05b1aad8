// What the .cu files of this folder compile.
#pragma once

#include "../../common/launch.h"
#include "../../mask/mask_regions.h"
#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm80::backward {

using mma::backward::Statistics;

// Compiled in sm80_backward_<dtype>_<dim>.cu.
template <DType kDType, int kDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, CUstream_st* stream);

// The gradient of the mask; compiled in sm80_mask_<dtype>_<dim>.cu. How its work is divided, and the gradient
// itself: `partial` has mask_partial_bytes().
template <DType kDType, int kDim>
MaskRegions regions_of_mask(const AttentionParams& params, const BackwardArguments& arguments);
template <DType kDType, int kDim>
void run_mask(const AttentionParams& params, const BackwardArguments& arguments, const Statistics& statistics,
              void* partial, const Launch& where);

}  // namespace selfattn::cuda::sm80::backward
