// Backward kernels of sm90, each for one element type, one padded head dim and one padded value dim.
#pragma once

#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm90::backward {

using mma::backward::Statistics;

// The gradients of queries, keys and values; selfattn_ext/build/sources.py lists the instances.
template <DType kDType, int kDim, int kValueDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, CUstream_st* stream);

}  // namespace selfattn::cuda::sm90::backward
