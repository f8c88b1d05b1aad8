// Forward kernels of sm80, each for one element type and one padded dim.
#pragma once

#include "../../core/attention_params.h"

struct CUstream_st;

namespace selfattn::cuda::sm80 {

// selfattn_ext/build/sources.py lists the instances, which a build compiles in a file each.
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
