// The backward by pairs. A kernels_*.cpp includes this file after the engine, and after gradient_pipeline.h
// if that has tiles.
#pragma once

#include "gradients_of_pairs.h"
#include "pair_passes.h"

#include "../fused/backward.h"
#include "../fused/captured_gradient.h"

namespace selfattn::cpu::SELFATTN_ISA {

size_t pair_backward_workspace(const AttentionParams& p) { return backward_workspace<Pairs>(p); }

void pair_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  backward_pass<Pairs>(p, a, pool);
}

void pair_captured_gradients(const AttentionParams& p, const BackwardArguments& a, const CapturedGradients& g,
                             const ThreadPool& pool) {
  captured_gradients<Pairs>(p, a, g, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
