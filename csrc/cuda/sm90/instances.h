// What the .cu files of this folder compile: one element type, one padded head dim and value dim each.
#pragma once

#include "../../core/attention_params.h"

struct CUstream_st;

namespace selfattn::cuda::sm90 {

// All sequences but those of few queries.
template <DType kDType, int kDim, int kValueDim>
void run_forward(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                 void* workspace);

}  // namespace selfattn::cuda::sm90
