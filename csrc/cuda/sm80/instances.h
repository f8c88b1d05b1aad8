// What the .cu files of this folder compile: one element type and one padded dim each.
#pragma once

#include "../../core/attention_params.h"

struct CUstream_st;

namespace selfattn::cuda::sm80 {

// Compiled in sm80_<dtype>_<dim>.cu.
template <DType kDType, int kDim>
void run_forward(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                 void* workspace);

// The same for the sequences of few queries alone, if any; see may_have_few_queries().
template <DType kDType, int kDim>
void run_few_queries(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                     void* workspace);

template <DType kDType, int kDim>
void run_weights(const AttentionParams& params, const WeightsOutputs& outputs, CUstream_st* stream);

}  // namespace selfattn::cuda::sm80
