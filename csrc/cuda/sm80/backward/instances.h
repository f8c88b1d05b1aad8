// What the .cu files of this folder compile.
#pragma once

#include "../../cuda_kernel_table.h"
#include "plan.h"

namespace selfattn::cuda::sm80::backward {

// The gradients of queries, keys and values; compiled in sm80_backward_<dtype>_<dim>.cu.
template <DType kDType, int kDim>
void run_sides(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, CUstream_st* stream);

// From what rows::prepare() left in the workspace; compiled in sm80_backward_statistics.cu.
void pad_statistics(const AttentionParams& params, const Statistics& to, bool plain, const Launch& where);

// A whole call: sm80_backward.cpp.
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);

}  // namespace selfattn::cuda::sm80::backward
