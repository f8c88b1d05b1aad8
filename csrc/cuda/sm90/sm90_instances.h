// Forward kernels of sm90, each for one element type, one padded head dim and one padded value dim.
#pragma once

#include "../../core/attention_params.h"

struct CUstream_st;

namespace selfattn::cuda::sm90 {

// All sequences but those of few queries. selfattn_ext/build/sources.py lists the instances.
template <DType kDType, int kDim, int kValueDim>
void run_forward(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                 void* workspace);

}  // namespace selfattn::cuda::sm90
