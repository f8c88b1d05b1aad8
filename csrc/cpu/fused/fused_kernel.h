// The entry points of one instruction set, by accumulation type. A kernels_*.cpp includes this last.
#pragma once

#include "backward.h"
#include "backward_backward.h"
#include "captured_gradient.h"
#include "forward.h"
#include "jvp.h"
#include "masked_softmax.h"
#include "scores.h"
#include "weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The entry point of two instances of a pass: the call's accumulation type chooses one.
template <auto kDouble, auto kFloat, class Params, class... Arguments>
auto by_type(const Params& p, Arguments... arguments) {
  return p.dtype == DType::kFloat64 ? kDouble(p, arguments...) : kFloat(p, arguments...);
}

constexpr Kernel fused_kernel(const char* isa, const char* description) {
  Kernel kernel{};
  kernel.name = "fused";
  kernel.isa = isa;
  kernel.description = description;
  kernel.automatic = true;
  kernel.forward = by_type<forward_pass<double>, forward_pass<float>>;
  kernel.weights = by_type<weights_pass<double>, weights_pass<float>>;
  kernel.backward_workspace = by_type<backward_workspace<double>, backward_workspace<float>>;
  kernel.backward = by_type<direct_backward<double>, direct_backward<float>>;
  kernel.captured_gradients = by_type<captured_gradients<double>, captured_gradients<float>>;
  kernel.jvp = by_type<jvp_pass<double>, jvp_pass<float>>;
  kernel.backward_backward_workspace =
      by_type<backward_backward_workspace<double>, backward_backward_workspace<float>>;
  kernel.backward_backward = by_type<backward_backward_pass<double>, backward_backward_pass<float>>;
  kernel.scores = by_type<scores_pass<double>, scores_pass<float>>;
  kernel.scores_backward = by_type<scores_backward_pass<double>, scores_backward_pass<float>>;
  kernel.masked_softmax = by_type<masked_softmax_pass<double>, masked_softmax_pass<float>>;
  kernel.masked_softmax_backward =
      by_type<masked_softmax_backward_pass<double>, masked_softmax_backward_pass<float>>;
  kernel.options = kFusedOptions;
  return kernel;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
