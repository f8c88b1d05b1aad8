// The entry in the kernel table, and the way from a dtype to its kernels.
#include "simt.h"

#include <stdexcept>

#include "../common/call_for_dtype.h"
#include "../function/captured_sums.h"
#include "../function/function_kernels.h"
#include "../split/split_keys.h"

namespace selfattn::cuda {

namespace simt {

namespace {

constexpr int kOldestCapability = 75;

const char* refuses(const AttentionParams&, int capability) {
  return capability >= kOldestCapability ? nullptr : "it needs compute capability 7.5 or newer";
}

size_t forward_workspace(const AttentionParams& p) {
  return p.dtype == DType::kFloat64 ? split_workspace<double>(p, /*rounds=*/false)
                                    : split_workspace<float>(p, /*rounds=*/false);
}

void forward_of_dtype(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  call_for_dtype<void, AttentionParams, const ForwardOutputs&, const Launch&>(
      p, &forward<DType::kFloat64>, &forward<DType::kFloat32>, &forward<DType::kBFloat16>,
      &forward<DType::kFloat16>, outputs, where);
}

void weights_of_dtype(const AttentionParams& p, const WeightsOutputs& outputs, const Launch& where) {
  call_for_dtype<void, AttentionParams, const WeightsOutputs&, const Launch&>(
      p, &weights<DType::kFloat64>, &weights<DType::kFloat32>, &weights<DType::kBFloat16>,
      &weights<DType::kFloat16>, outputs, where);
}

size_t mask_workspace_of_dtype(const AttentionParams& p, const BackwardArguments& a) {
  if (a.grad_mask.data == nullptr) return 0;
  return call_for_dtype<size_t, AttentionParams, const BackwardArguments&>(
      p, &mask_workspace<DType::kFloat64>, &mask_workspace<DType::kFloat32>,
      &mask_workspace<DType::kBFloat16>, &mask_workspace<DType::kFloat16>, a);
}

size_t backward_workspace(const AttentionParams& p, const BackwardArguments& a) {
  return rows::row_gradients_bytes(p) + mask_workspace_of_dtype(p, a);
}

void backward_of_dtype(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  call_for_dtype<void, AttentionParams, const BackwardArguments&, const Launch&>(
      p, &backward<DType::kFloat64>, &backward<DType::kFloat32>, &backward<DType::kBFloat16>,
      &backward<DType::kFloat16>, a, where);
  if (a.grad_mask.data == nullptr) return;
  call_for_dtype<void, AttentionParams, const BackwardArguments&, const Launch&>(
      p, &mask_gradient<DType::kFloat64>, &mask_gradient<DType::kFloat32>, &mask_gradient<DType::kBFloat16>,
      &mask_gradient<DType::kFloat16>, a, where);
}

void jvp_of_dtype(const AttentionParams& p, const JvpArguments& a, const Launch& where) {
  forward_of_dtype(p, a.forward, where);
  call_for_dtype<void, AttentionParams, const JvpArguments&, const Launch&>(
      p, &jvp<DType::kFloat64>, &jvp<DType::kFloat32>, &jvp<DType::kBFloat16>, &jvp<DType::kFloat16>, a,
      where);
}

size_t backward_backward_workspace(const AttentionParams& p, const BackwardBackwardArguments& a) {
  return tangent_rows_bytes(p) + mask_workspace_of_dtype(p, a.backward);
}

void backward_backward_of_dtype(const AttentionParams& p, const BackwardBackwardArguments& a,
                                const Launch& where) {
  BackwardArguments first = a.backward;
  first.grad_sinks_rows = nullptr;  // the first derivative's, which nobody wants
  rows::prepare(p, first, where.workspace, where);
  call_for_dtype<void, AttentionParams, const BackwardBackwardArguments&, const Launch&>(
      p, &backward_backward<DType::kFloat64>, &backward_backward<DType::kFloat32>,
      &backward_backward<DType::kBFloat16>, &backward_backward<DType::kFloat16>, a, where);
  if (a.backward.grad_mask.data == nullptr) return;
  call_for_dtype<void, AttentionParams, const BackwardBackwardArguments&, const Launch&>(
      p, &tangent_mask<DType::kFloat64>, &tangent_mask<DType::kFloat32>, &tangent_mask<DType::kBFloat16>,
      &tangent_mask<DType::kFloat16>, a, where);
}

size_t captured_workspace_of_dtype(const AttentionParams& p, const CapturedGradients& g) {
  if (g.count > CapturedSums::kMostTensors) {
    throw std::invalid_argument("a function of scores has gradients of more tensors than a kernel takes");
  }
  if (g.size() >= CapturedSums::kNowhere) {
    throw std::invalid_argument("the captured tensors with a gradient have 2^32 elements or more");
  }
  return call_for_dtype<size_t, AttentionParams, const CapturedGradients&>(
      p, &captured_workspace<DType::kFloat64>, &captured_workspace<DType::kFloat32>,
      &captured_workspace<DType::kBFloat16>, &captured_workspace<DType::kFloat16>, g);
}

void captured_gradients_of_dtype(const AttentionParams& p, const BackwardArguments& a,
                                 const CapturedGradients& g, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  call_for_dtype<void, AttentionParams, const BackwardArguments&, const CapturedGradients&, const Launch&>(
      p, &captured_gradients<DType::kFloat64>, &captured_gradients<DType::kFloat32>,
      &captured_gradients<DType::kBFloat16>, &captured_gradients<DType::kFloat16>, a, g, where);
}

void scores_of_dtype(const ScoresParams& p, const Launch& where) {
  call_for_dtype<void, ScoresParams, const Launch&>(p, &scores<DType::kFloat64>, &scores<DType::kFloat32>,
                                                    &scores<DType::kBFloat16>, &scores<DType::kFloat16>,
                                                    where);
}

void scores_backward_of_dtype(const ScoresParams& p, const Launch& where) {
  call_for_dtype<void, ScoresParams, const Launch&>(
      p, &scores_backward<DType::kFloat64>, &scores_backward<DType::kFloat32>,
      &scores_backward<DType::kBFloat16>, &scores_backward<DType::kFloat16>, where);
}

void masked_softmax_of_dtype(const SoftmaxParams& p, const Launch& where) {
  call_for_dtype<void, SoftmaxParams, const Launch&>(
      p, &masked_softmax<DType::kFloat64>, &masked_softmax<DType::kFloat32>,
      &masked_softmax<DType::kBFloat16>, &masked_softmax<DType::kFloat16>, where);
}

void masked_softmax_backward_of_dtype(const SoftmaxParams& p, const Launch& where) {
  call_for_dtype<void, SoftmaxParams, const Launch&>(
      p, &masked_softmax_backward<DType::kFloat64>, &masked_softmax_backward<DType::kFloat32>,
      &masked_softmax_backward<DType::kBFloat16>, &masked_softmax_backward<DType::kFloat16>, where);
}

constexpr Kernel entry() {
  Kernel kernel;
  kernel.name = "simt";
  kernel.description = "plain multiply-adds in full precision, for every call";
  kernel.options =
      OptionSet{Option::kMask,          Option::kOwnMasks,      Option::kAlibiSlopes, Option::kSinks,
                Option::kDropout,       Option::kWindow,        Option::kQueryOffset, Option::kSoftcap,
                Option::kPackedQueries, Option::kPackedKeys,    Option::kKeyLengths,  Option::kQueryOffsets,
                Option::kPages,         Option::kBatchInvariant}
          .with(kFunctionOptions);
  kernel.refuses = &refuses;
  kernel.forward_workspace = &forward_workspace;
  kernel.forward = &forward_of_dtype;
  kernel.weights = &weights_of_dtype;
  kernel.backward_workspace = &backward_workspace;
  kernel.backward = &backward_of_dtype;
  kernel.jvp = &jvp_of_dtype;
  kernel.backward_backward_workspace = &backward_backward_workspace;
  kernel.backward_backward = &backward_backward_of_dtype;
  kernel.captured_workspace = &captured_workspace_of_dtype;
  kernel.captured_gradients = &captured_gradients_of_dtype;
  kernel.scores = &scores_of_dtype;
  kernel.scores_backward = &scores_backward_of_dtype;
  kernel.masked_softmax = &masked_softmax_of_dtype;
  kernel.masked_softmax_backward = &masked_softmax_backward_of_dtype;
  return kernel;
}

}  // namespace
}  // namespace simt

constexpr Kernel kSimt = simt::entry();

}  // namespace selfattn::cuda
