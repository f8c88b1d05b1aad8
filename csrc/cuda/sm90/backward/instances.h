// What the .cu files of this folder compile: one element type, one padded head dim and value dim each.
#pragma once

#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm90::backward {

using mma::backward::Statistics;

// The gradients of queries, keys and values; compiled in sm90_backward_<dtype>_<dim>[_<value dim>].cu.
template <DType kDType, int kDim, int kValueDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, CUstream_st* stream);

}  // namespace selfattn::cuda::sm90::backward
