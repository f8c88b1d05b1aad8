// The gradients of queries, keys and values by sm90.
#pragma once

#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm90::backward {

using mma::backward::Statistics;

// Whether these kernels compute the gradients of a call that the forward's take: otherwise sm80 does.
bool takes(const AttentionParams& params, const BackwardArguments& arguments);

// Chooses the kernels for the call's element type and dims.
void run(const AttentionParams& params, const BackwardArguments& arguments, const Statistics& statistics,
         CUstream_st* stream);

// One kernel, for an element type, a padded head dim and a padded value dim; selfattn_ext/build/sources.py
// lists the instances.
template <DType kDType, int kDim, int kValueDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, CUstream_st* stream);

}  // namespace selfattn::cuda::sm90::backward
