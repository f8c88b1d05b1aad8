// Forward mode and second derivatives by pairs. A kernels_*.cpp includes this file after exact_by_vectors.h
// or exact_by_tiles.h.
#pragma once

#include "pair_passes.h"

#include "../fused/backward_backward.h"
#include "../fused/jvp.h"

namespace selfattn::cpu::SELFATTN_ISA {

void pair_jvp(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool) {
  jvp_pass<ExactPairs>(p, a, pool);
}

size_t pair_backward_backward_workspace(const AttentionParams& p) {
  return backward_backward_workspace<ExactPairs>(p);
}

void pair_backward_backward(const AttentionParams& p, const BackwardBackwardArguments& a,
                            const ThreadPool& pool) {
  backward_backward_pass<ExactPairs>(p, a, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
