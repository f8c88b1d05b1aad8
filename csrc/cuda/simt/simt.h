// "simt": attention by plain multiply-adds, for every dtype, shape, option and layout.
//
// It runs on compute capability 7.5 and newer, and takes every call that no other kernel takes.
#pragma once

#include "../cuda_kernel.h"
#include "../rows/rows.h"
#include "inverse_lists.h"

namespace selfattn::cuda {

extern const Kernel kSimt;

namespace simt {

// selfattn_ext/build/sources.py lists the instances of these templates.
template <DType kDType>
void forward(const AttentionParams& params, const ForwardOutputs& outputs, const Launch& where);
template <DType kDType>
void weights(const AttentionParams& params, const WeightsOutputs& outputs, const Launch& where);
template <DType kDType>
void backward(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);
// The bytes of partial sums, which follow the row gradients in the workspace.
template <DType kDType>
size_t mask_workspace(const AttentionParams& params, const BackwardArguments& arguments);
template <DType kDType>
void mask_gradient(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);
// The forward and the backward of calls with selected keys. The workspace is of selected_workspace() bytes.
template <DType kDType>
void selected_forward(const AttentionParams& params, const ForwardOutputs& outputs, const Launch& where);
template <DType kDType>
void selected_backward(const AttentionParams& params, const BackwardArguments& arguments,
                       const Launch& where);
// The bytes of the row gradients and of the inverse lists.
inline size_t selected_workspace(const AttentionParams& params) {
  return rows::row_gradients_bytes(params) + inverse_lists_bytes(params);
}
// Forward mode, after the forward has run.
template <DType kDType>
void jvp(const AttentionParams& params, const JvpArguments& arguments, const Launch& where);
// All second derivatives except the mask's, from row gradients in the workspace.
template <DType kDType>
void backward_backward(const AttentionParams& params, const BackwardBackwardArguments& arguments,
                       const Launch& where);
template <DType kDType>
void tangent_mask(const AttentionParams& params, const BackwardBackwardArguments& arguments,
                  const Launch& where);
// The bytes at the start of their workspace, before the partial sums of a mask: the row gradients, and one
// more number for each row.
inline size_t tangent_rows_bytes(const AttentionParams& params) {
  return rows::row_gradients_bytes(params) + rows::row_array_bytes(params);
}
// The bytes of the row gradients and of copies of the result.
template <DType kDType>
size_t captured_workspace(const AttentionParams& params, const CapturedGradients& gradients);
template <DType kDType>
void captured_gradients(const AttentionParams& params, const BackwardArguments& arguments,
                        const CapturedGradients& gradients, const Launch& where);
// row_top and row_mean, after the forward has run, whichever kernel's it was; and sums of weights.
template <DType kDType>
void statistics(const AttentionParams& params, const ForwardOutputs& outputs, const Launch& where);
template <DType kDType>
void weight_sums(const AttentionParams& params, const WeightSums& sums, const Launch& where);
template <DType kDType>
void scores(const ScoresParams& params, const Launch& where);
template <DType kDType>
void scores_backward(const ScoresParams& params, const Launch& where);
template <DType kDType>
void masked_softmax(const SoftmaxParams& params, const Launch& where);
template <DType kDType>
void masked_softmax_backward(const SoftmaxParams& params, const Launch& where);

}  // namespace simt
}  // namespace selfattn::cuda
