#include "sm90.h"

#include <algorithm>

#include "../function/function_kernels.h"
#include "../sm80/sm80.h"
#include "backward/sm90_backward.h"
#include "sm90_plan.h"

namespace selfattn::cuda {

namespace sm90 {
namespace {

constexpr int kCapability = 90;

// The function compiled for a padded head dim and value dim.
using Instance = void (*)(const AttentionParams&, const ForwardOutputs&, CUstream_st*, void* workspace);

template <DType kDType>
Instance instance_for(int64_t dim, int64_t value_dim) {
  const int64_t larger = std::max(dim, value_dim);
  if (larger <= 64) return &run_forward<kDType, 64, 64>;
  if (larger <= 96) return &run_forward<kDType, 96, 128>;
  if (larger <= 128) return &run_forward<kDType, 128, 128>;
  if (larger <= 192 && value_dim <= 128) return &run_forward<kDType, 192, 128>;
  if (larger <= 192) return &run_forward<kDType, 192, 192>;
  return &run_forward<kDType, 256, 256>;
}

Instance instance_for(const AttentionParams& p) {
  return p.dtype == DType::kBFloat16 ? instance_for<DType::kBFloat16>(p.head_dim, p.value_dim)
                                     : instance_for<DType::kFloat16>(p.head_dim, p.value_dim);
}

const char* refuses(const AttentionParams& p, int capability) {
#if !defined(SELFATTN_CUDA_HOPPER)
  return "this build has no code for compute capability 9.0 alone (9.0a in TORCH_CUDA_ARCH_LIST)";
#endif
  if (capability != kCapability) return "its instructions are those of compute capability 9.0 alone";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16)
    return "it computes only bfloat16 and float16";
  constexpr int64_t kLeastDim = 32;
  if (std::max(p.head_dim, p.value_dim) <= kLeastDim) return "it takes head dims above 32";
  if (std::max(p.head_dim, p.value_dim) > kMostDimWithOptions && !mma::is_bare(p)) {
    return "above head dims of 192 it takes only calls without masks and other changes of scores";
  }
  if (has_few_queries(p)) return "it leaves few queries to \"sm80\"";
  if (const char* reason = kSm80.refuses(p, capability)) return reason;
  if (p.head_dim == 0 || p.value_dim == 0 || p.keys == 0)
    return "a tensor map cannot describe an empty tensor";
  if (!can_be_mapped(p)) return "rows must begin at multiples of 16 bytes and must not be repeated";
  return nullptr;
}

void forward(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  if (may_have_few_queries(p)) sm80::forward_of_few_queries(p, outputs, where);
  instance_for(p)(p, outputs, where.stream, where.workspace);
}

void run_backward(const AttentionParams& p, const BackwardArguments& arguments, const Launch& where) {
  if (!backward::takes(p, arguments)) return kSm80.backward(p, arguments, where);
  const mma::backward::Statistics statistics = mma::backward::prepare_statistics(p, arguments, where);
  backward::run(p, arguments, statistics, where.stream);
  sm80::gradient_of_mask(p, arguments, statistics, where);
}

// sm80 computes the weights, and says how much memory the gradients need.
constexpr Kernel entry() {
  Kernel kernel;
  kernel.name = "sm90";
  kernel.description = "tensor cores of Hopper by wgmma, tiles copied by tensor maps";
  kernel.options =
      OptionSet{Option::kMask,          Option::kOwnMasks,   Option::kAlibiSlopes, Option::kSinks,
                Option::kDropout,       Option::kWindow,     Option::kQueryOffset, Option::kSoftcap,
                Option::kPackedQueries, Option::kPackedKeys, Option::kKeyLengths,  Option::kQueryOffsets,
                Option::kPages};
  kernel.refuses = &refuses;
  kernel.forward_workspace = &forward_workspace;
  kernel.forward = &forward;
  kernel.weights = [](const AttentionParams& p, const WeightsOutputs& outputs, const Launch& where) {
    kSm80.weights(p, outputs, where);
  };
  kernel.backward_workspace = [](const AttentionParams& p, const BackwardArguments& arguments) {
    return kSm80.backward_workspace(p, arguments);
  };
  kernel.backward = &run_backward;
  return kernel;
}

}  // namespace
}  // namespace sm90

constexpr Kernel kSm90 = sm90::entry();

}  // namespace selfattn::cuda
