// The entry points of one instruction set, by accumulation type. A kernels_*.cpp includes this last; those of
// selected keys are in a source of their own, so that none takes long to compile.
#pragma once

#include "backward.h"
#include "backward_backward.h"
#include "by_type.h"
#include "captured_gradient.h"
#include "few_keys_backward.h"
#include "forward.h"
#include "jvp.h"
#include "masked_softmax.h"
#include "scores.h"
#include "weight_sums.h"
#include "weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The backward in T itself, of few queries and of many. Strips go first, because the pass of a mask that
// elements share adds to what others have stored.
template <class T>
void direct_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  const int64_t few = most_in_backward(p);
  const bool few_keys = few >= 0 && takes_few_keys(p, a);
  if (p.sequences.any()) {
    AttentionParams some = p;
    some.sequences.least_queries = larger(p.sequences.least_queries, few + 1);
    backward_sequences<T>(some, a, pool);
    some.sequences = p.sequences;
    some.sequences.most_queries = smaller(p.sequences.most_queries, few);
    if (few_keys) {
      few_keys_backward<T>(p, a, few, pool);
      some.sequences.least_keys = kFewKeys + 1;
    }
    const auto calls = element_calls(some, a, 0, few);
    few_query_backward<T>(calls, pool);
    if (a.grad_mask.data != nullptr) mask_gradient<T>(some, a, calls, pool);
  } else if (p.queries <= few) {
    if (few_keys && has_few_pairs(p)) return few_keys_backward<T>(p, a, few, pool);
    few_query_backward<T>(p, a, pool);
    if (a.grad_mask.data != nullptr) mask_gradient<T>(p, a, pool);
  } else {
    backward_pass<T>(p, a, pool);
  }
}

// In ../sparse/direct_selected.h.
void direct_selected_forward(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool);
size_t direct_selected_workspace(const AttentionParams& p);
void direct_selected_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool);

constexpr Kernel fused_kernel(const char* isa, const char* description) {
  Kernel kernel{};
  kernel.name = "fused";
  kernel.isa = isa;
  kernel.description = description;
  kernel.automatic = true;
  kernel.forward = by_type<forward_pass<double>, forward_pass<float>>;
  kernel.weights = by_type<weights_pass<double>, weights_pass<float>>;
  kernel.weight_sums = by_type<weight_sums_pass<double>, weight_sums_pass<float>>;
  kernel.backward_workspace = by_type<backward_workspace<double>, backward_workspace<float>>;
  kernel.backward = by_type<direct_backward<double>, direct_backward<float>>;
  kernel.captured_gradients = by_type<captured_gradients<double>, captured_gradients<float>>;
  kernel.jvp = by_type<jvp_pass<double>, jvp_pass<float>>;
  kernel.backward_backward_workspace =
      by_type<backward_backward_workspace<double>, backward_backward_workspace<float>>;
  kernel.backward_backward = by_type<backward_backward_pass<double>, backward_backward_pass<float>>;
  kernel.selected_forward = direct_selected_forward;
  kernel.selected_backward_workspace = direct_selected_workspace;
  kernel.selected_backward = direct_selected_backward;
  kernel.scores = by_type<scores_pass<double>, scores_pass<float>>;
  kernel.scores_backward = by_type<scores_backward_pass<double>, scores_backward_pass<float>>;
  kernel.masked_softmax = by_type<masked_softmax_pass<double>, masked_softmax_pass<float>>;
  kernel.masked_softmax_backward =
      by_type<masked_softmax_backward_pass<double>, masked_softmax_backward_pass<float>>;
  kernel.options = kFusedOptions;
  return kernel;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
