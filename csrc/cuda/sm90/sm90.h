// "sm90": attention on the tensor cores of Hopper by wgmma and TMA, for compute capability 9.0.
#pragma once

#include "../cuda_kernel.h"

namespace selfattn::cuda {

extern const Kernel kSm90;

namespace sm90 {

// All sequences but those of few queries. selfattn_ext/build/sources.py lists the instances.
template <DType kDType, int kDim, int kValueDim>
void run_forward(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                 void* workspace);

}  // namespace sm90
}  // namespace selfattn::cuda
