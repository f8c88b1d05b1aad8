// The entry in the kernel table, and the way from a dtype to its kernels.
#include "simt.h"

#include <stdexcept>
#include <string>

namespace selfattn::cuda {

namespace simt {

namespace {

constexpr int kOldestCapability = 75;

const char* refuses(const AttentionParams&, int capability) {
  return capability >= kOldestCapability ? nullptr : "it needs compute capability 7.5 or newer";
}

size_t forward_workspace(const AttentionParams&) { return 0; }

// Calls the function of the params' dtype: one of four with the same arguments.
template <class Params, class... Arguments>
void call_for_dtype(const Params& p, void (*float64)(const Params&, Arguments...),
                    void (*float32)(const Params&, Arguments...),
                    void (*bfloat16)(const Params&, Arguments...),
                    void (*float16)(const Params&, Arguments...), Arguments... arguments) {
  switch (p.dtype) {
    case DType::kFloat64:
      return float64(p, arguments...);
    case DType::kFloat32:
      return float32(p, arguments...);
    case DType::kBFloat16:
      return bfloat16(p, arguments...);
    case DType::kFloat16:
      return float16(p, arguments...);
    case DType::kBool:
      break;
  }
  throw std::invalid_argument(std::string("attention of dtype ") + name_of(p.dtype) + " does not exist");
}

void forward_of_dtype(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  call_for_dtype<AttentionParams, const ForwardOutputs&, const Launch&>(
      p, &forward<DType::kFloat64>, &forward<DType::kFloat32>, &forward<DType::kBFloat16>,
      &forward<DType::kFloat16>, outputs, where);
}

void weights_of_dtype(const AttentionParams& p, const WeightsOutputs& outputs, const Launch& where) {
  call_for_dtype<AttentionParams, const WeightsOutputs&, const Launch&>(
      p, &weights<DType::kFloat64>, &weights<DType::kFloat32>, &weights<DType::kBFloat16>,
      &weights<DType::kFloat16>, outputs, where);
}

void scores_of_dtype(const ScoresParams& p, const Launch& where) {
  call_for_dtype<ScoresParams, const Launch&>(p, &scores<DType::kFloat64>, &scores<DType::kFloat32>,
                                              &scores<DType::kBFloat16>, &scores<DType::kFloat16>, where);
}

void masked_softmax_of_dtype(const SoftmaxParams& p, const Launch& where) {
  call_for_dtype<SoftmaxParams, const Launch&>(
      p, &masked_softmax<DType::kFloat64>, &masked_softmax<DType::kFloat32>,
      &masked_softmax<DType::kBFloat16>, &masked_softmax<DType::kFloat16>, where);
}

}  // namespace
}  // namespace simt

const Kernel kSimt = {
    "simt",
    "plain multiply-adds in full precision, for every call",
    &simt::refuses,
    &simt::forward_workspace,
    &simt::forward_of_dtype,
    &simt::weights_of_dtype,
    /*backward_workspace=*/nullptr,
    /*backward=*/nullptr,
    &simt::scores_of_dtype,
    /*scores_backward=*/nullptr,
    &simt::masked_softmax_of_dtype,
    /*masked_softmax_backward=*/nullptr,
};

}  // namespace selfattn::cuda
