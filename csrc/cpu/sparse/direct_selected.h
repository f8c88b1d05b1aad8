// The entry points of selected keys in the accumulation type itself. A kernels_*_selected.cpp includes this
// last.
#pragma once

#include "../fused/by_type.h"
#include "backward.h"
#include "forward.h"

namespace selfattn::cpu::SELFATTN_ISA {

void direct_selected_forward(const AttentionParams& p, const ForwardOutputs& outputs,
                             const ThreadPool& pool) {
  by_type<selected_forward<double>, selected_forward<float>>(p, outputs, pool);
}

size_t direct_selected_workspace(const AttentionParams& p) {
  return by_type<selected_backward_workspace<double>, selected_backward_workspace<float>>(p);
}

void direct_selected_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  by_type<selected_backward<double>, selected_backward<float>>(p, a, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
