// Backward kernels of sm90, each for one element type, one padded head dim and one padded value dim.
#pragma once

#include "../../common/launch.h"
#include "plan.h"

struct CUstream_st;

namespace selfattn::cuda::sm90::backward {

// The gradients of queries, keys and values; selfattn_ext/build/sources.py lists the instances.
template <DType kDType, int kDim, int kValueDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const sm80::backward::Statistics& statistics, CUstream_st* stream);

// A whole call, with the workspace of sm80's: sm90_backward.cpp.
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);

}  // namespace selfattn::cuda::sm90::backward
