// What the .cu files of this folder compile: one element type, one padded head dim and value dim each.
#pragma once

#include "../../common/launch.h"
#include "plan.h"

struct CUstream_st;

namespace selfattn::cuda::sm90::backward {

// The gradients of queries, keys and values; compiled in sm90_backward_<dtype>_<dim>[_<value dim>].cu.
template <DType kDType, int kDim, int kValueDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const sm80::backward::Statistics& statistics, CUstream_st* stream);

// A whole call, with the workspace of sm80's: sm90_backward.cpp.
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);

}  // namespace selfattn::cuda::sm90::backward
