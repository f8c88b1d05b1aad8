// Backward kernels of sm80, each for one element type and one padded dim.
#pragma once

#include "../../common/launch.h"
#include "../../mask/mask_regions.h"
#include "plan.h"

namespace selfattn::cuda::sm80::backward {

// The gradients of queries, keys and values.
using Sides = void (*)(const AttentionParams&, const BackwardArguments&, const Statistics&, CUstream_st*);

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

// From what rows::prepare() left in the workspace; compiled in sm80_backward_statistics.cu.
void pad_statistics(const AttentionParams& params, const Statistics& to, bool plain, const Launch& where);

// A whole call: sm80_backward.cpp. Workspace: statistics_bytes(), and what the mask's gradient needs.
size_t workspace_bytes(const AttentionParams& params, const BackwardArguments& arguments);
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);
// The same with another kernel's sides.
void run(const AttentionParams& params, const BackwardArguments& arguments, Sides sides, const Launch& where);

}  // namespace selfattn::cuda::sm80::backward
