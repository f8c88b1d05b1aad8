// "sm80": attention on tensor cores by mma.sync, for compute capability 8.0 and later.
#pragma once

#include "../cuda_kernel.h"
#include "../mma/backward/backward_plan.h"

namespace selfattn::cuda {

extern const Kernel kSm80;

namespace sm80 {

// Kernels for an element type and a padded dim; selfattn_ext/build/sources.py lists the instances, which a
// build compiles in a file each.
template <DType kDType, int kDim>
void run_forward(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                 void* workspace);

// The same for the sequences of few queries alone, if any; see may_have_few_queries().
template <DType kDType, int kDim>
void run_few_queries(const AttentionParams& params, const ForwardOutputs& outputs, CUstream_st* stream,
                     void* workspace);

template <DType kDType, int kDim>
void run_weights(const AttentionParams& params, const WeightsOutputs& outputs, CUstream_st* stream);

// Computes the forward of the sequences of few queries alone, if the call has any (split_keys.h), for a
// kernel that leaves them to this one. The workspace is that of kSm80's forward.
void forward_of_few_queries(const AttentionParams& params, const ForwardOutputs& outputs,
                            const Launch& where);

// Computes the gradient of the mask, if one is wanted, for a kernel that computes the others itself. The
// workspace is that of kSm80's backward, and holds the statistics.
void gradient_of_mask(const AttentionParams& params, const BackwardArguments& arguments,
                      const mma::backward::Statistics& statistics, const Launch& where);

}  // namespace sm80
}  // namespace selfattn::cuda
