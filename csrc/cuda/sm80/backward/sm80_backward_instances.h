// Backward kernels of sm80, each for one element type and one padded dim.
#pragma once

#include "../../common/launch.h"
#include "../../mask/mask_regions.h"
#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm80::backward {

using mma::backward::Statistics;

// selfattn_ext/build/sources.py lists the instances, also those of the mask's gradient.
template <DType kDType, int kDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, CUstream_st* stream);

// The gradient of the mask: how its work is divided, and the gradient itself. `partial` has
// mask_partial_bytes().
template <DType kDType, int kDim>
MaskRegions regions_of_mask(const AttentionParams& params, const BackwardArguments& arguments);
template <DType kDType, int kDim>
void run_mask(const AttentionParams& params, const BackwardArguments& arguments, const Statistics& statistics,
              void* partial, const Launch& where);

}  // namespace selfattn::cuda::sm80::backward
