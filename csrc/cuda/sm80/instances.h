// What the .cu files of this folder compile: one element type and one padded dim each.
#pragma once

#include "plan.h"

struct CUstream_st;

namespace selfattn::cuda::sm80 {

// Compiled in sm80_<dtype>_<dim>.cu for the three 32-bit and smaller types and the dims of padded_dim().
template <DType kDType, int kDim>
void run_forward(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                 void* workspace);

// Compiled in sm80_merge.cu for the same types: joins the splits.
template <DType kDType>
void run_merge(const ForwardPlan& plan, CUstream_st* stream);

}  // namespace selfattn::cuda::sm80
