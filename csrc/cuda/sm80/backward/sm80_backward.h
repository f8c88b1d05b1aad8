// A backward call of sm80.
#pragma once

#include <cstddef>

#include "../../mask/mask_regions.h"
#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm80::backward {

using mma::backward::Statistics;

// Whether these kernels compute the gradients of such a call: otherwise simt does.
bool takes(const AttentionParams& params);

// The workspace holds the statistics, and what the mask's gradient needs.
size_t workspace_bytes(const AttentionParams& params, const BackwardArguments& arguments);
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);

// Kernels for an element type and a padded dim; selfattn_ext/build/sources.py lists the instances, also those
// of the mask's gradient.
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
