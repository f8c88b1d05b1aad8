// The entry of "simt" in the kernel table, which calls the kernels of each dtype.
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

const char* refuses(const AttentionParams& p, int capability) {
  if (p.selection.lists != nullptr && p.function.any()) {
    return "it applies no score_function and no block_map together with selection";
  }
  return capability >= kOldestCapability ? nullptr : "it needs compute capability 7.5 or newer";
}

size_t forward_workspace(const AttentionParams& p) {
  if (p.selection.lists != nullptr) return 0;
  return p.dtype == DType::kFloat64 ? split_workspace<double>(p, /*rounds=*/false)
                                    : split_workspace<float>(p, /*rounds=*/false);
}

void forward_of_dtype(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  call_for_dtype(p.dtype, [&](auto dtype) {
    if (p.selection.lists != nullptr) return selected_forward<dtype>(p, outputs, where);
    forward<dtype>(p, outputs, where);
  });
}

size_t mask_workspace_of_dtype(const AttentionParams& p, const BackwardArguments& a) {
  if (a.grad_mask.data == nullptr) return 0;
  return call_for_dtype(p.dtype, [&](auto dtype) { return mask_workspace<dtype>(p, a); });
}

size_t backward_workspace(const AttentionParams& p, const BackwardArguments& a) {
  if (p.selection.lists != nullptr) return selected_workspace(p);
  return rows::row_gradients_bytes(p) + mask_workspace_of_dtype(p, a);
}

void backward_of_dtype(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  call_for_dtype(p.dtype, [&](auto dtype) {
    if (p.selection.lists != nullptr) return selected_backward<dtype>(p, a, where);
    backward<dtype>(p, a, where);
  });
  if (a.grad_mask.data == nullptr) return;
  call_for_dtype(p.dtype, [&](auto dtype) { mask_gradient<dtype>(p, a, where); });
}

void jvp_of_dtype(const AttentionParams& p, const JvpArguments& a, const Launch& where) {
  forward_of_dtype(p, a.forward, where);
  call_for_dtype(p.dtype, [&](auto dtype) { jvp<dtype>(p, a, where); });
}

size_t backward_backward_workspace(const AttentionParams& p, const BackwardBackwardArguments& a) {
  return tangent_rows_bytes(p) + mask_workspace_of_dtype(p, a.backward);
}

void backward_backward_of_dtype(const AttentionParams& p, const BackwardBackwardArguments& a,
                                const Launch& where) {
  BackwardArguments first = a.backward;
  first.grad_sinks_rows = nullptr;  // only the second derivative's is wanted
  rows::prepare(p, first, where.workspace, where);
  call_for_dtype(p.dtype, [&](auto dtype) { backward_backward<dtype>(p, a, where); });
  if (a.backward.grad_mask.data == nullptr) return;
  call_for_dtype(p.dtype, [&](auto dtype) { tangent_mask<dtype>(p, a, where); });
}

size_t captured_workspace_of_dtype(const AttentionParams& p, const CapturedGradients& g) {
  if (g.count > CapturedSums::kMostTensors) {
    throw std::invalid_argument("a function of scores has gradients of more tensors than a kernel takes");
  }
  if (g.size() >= CapturedSums::kNowhere) {
    throw std::invalid_argument("the captured tensors with a gradient have 2^32 elements or more");
  }
  return call_for_dtype(p.dtype, [&](auto dtype) { return captured_workspace<dtype>(p, g); });
}

void captured_gradients_of_dtype(const AttentionParams& p, const BackwardArguments& a,
                                 const CapturedGradients& g, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  call_for_dtype(p.dtype, [&](auto dtype) { captured_gradients<dtype>(p, a, g, where); });
}

constexpr Kernel entry() {
  Kernel kernel;
  kernel.name = "simt";
  kernel.description = "plain multiply-adds in full precision, for every call";
  kernel.options =
      OptionSet{Option::kMask,          Option::kOwnMasks,       Option::kAlibiSlopes, Option::kSinks,
                Option::kDropout,       Option::kWindow,         Option::kQueryOffset, Option::kSoftcap,
                Option::kPackedQueries, Option::kPackedKeys,     Option::kKeyLengths,  Option::kQueryOffsets,
                Option::kPages,         Option::kBatchInvariant, Option::kSelection}
          .with(kFunctionOptions);
  kernel.refuses = &refuses;
  kernel.forward_workspace = &forward_workspace;
  kernel.forward = &forward_of_dtype;
  kernel.weights = [](const AttentionParams& p, const WeightsOutputs& outputs, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { weights<dtype>(p, outputs, where); });
  };
  kernel.backward_workspace = &backward_workspace;
  kernel.backward = &backward_of_dtype;
  kernel.jvp = &jvp_of_dtype;
  kernel.backward_backward_workspace = &backward_backward_workspace;
  kernel.backward_backward = &backward_backward_of_dtype;
  kernel.captured_workspace = &captured_workspace_of_dtype;
  kernel.captured_gradients = &captured_gradients_of_dtype;
  kernel.statistics = [](const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { statistics<dtype>(p, outputs, where); });
  };
  kernel.weight_sums = [](const AttentionParams& p, const WeightSums& sums, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { weight_sums<dtype>(p, sums, where); });
  };
  kernel.scores = [](const ScoresParams& p, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { scores<dtype>(p, where); });
  };
  kernel.scores_backward = [](const ScoresParams& p, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { scores_backward<dtype>(p, where); });
  };
  kernel.masked_softmax = [](const SoftmaxParams& p, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { masked_softmax<dtype>(p, where); });
  };
  kernel.masked_softmax_backward = [](const SoftmaxParams& p, const Launch& where) {
    call_for_dtype(p.dtype, [&](auto dtype) { masked_softmax_backward<dtype>(p, where); });
  };
  return kernel;
}

}  // namespace
}  // namespace simt

constexpr Kernel kSimt = simt::entry();

}  // namespace selfattn::cuda
