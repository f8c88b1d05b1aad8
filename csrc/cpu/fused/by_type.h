// Chooses the instance of a pass that computes in the type of a call.
#pragma once

#include "../../core/attention_params.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The entry point of two instances of a pass: the call's accumulation type chooses one.
template <auto kDouble, auto kFloat, class Params, class... Arguments>
auto by_type(const Params& p, Arguments... arguments) {
  return p.dtype == DType::kFloat64 ? kDouble(p, arguments...) : kFloat(p, arguments...);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
