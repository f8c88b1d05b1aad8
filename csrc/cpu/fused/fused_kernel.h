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

inline void fused_forward(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? forward_pass<double>(p, o, pool) : forward_pass<float>(p, o, pool);
}
inline void fused_weights(const AttentionParams& p, const WeightsOutputs& o, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? weights_pass<double>(p, o, pool) : weights_pass<float>(p, o, pool);
}
inline size_t fused_backward_workspace(const AttentionParams& p) {
  return p.dtype == DType::kFloat64 ? backward_workspace<double>(p) : backward_workspace<float>(p);
}
inline void fused_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? backward_pass<double>(p, a, pool) : backward_pass<float>(p, a, pool);
}
inline void fused_jvp(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? jvp_pass<double>(p, a, pool) : jvp_pass<float>(p, a, pool);
}
inline size_t fused_backward_backward_workspace(const AttentionParams& p) {
  return p.dtype == DType::kFloat64 ? backward_backward_workspace<double>(p)
                                    : backward_backward_workspace<float>(p);
}
inline void fused_backward_backward(const AttentionParams& p, const BackwardBackwardArguments& a,
                                    const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? backward_backward_pass<double>(p, a, pool)
                             : backward_backward_pass<float>(p, a, pool);
}
inline void fused_captured_gradients(const AttentionParams& p, const BackwardArguments& a,
                                     const CapturedGradients& g, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? captured_gradients<double>(p, a, g, pool)
                             : captured_gradients<float>(p, a, g, pool);
}
inline void fused_scores(const ScoresParams& p, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? scores_pass<double>(p, pool) : scores_pass<float>(p, pool);
}
inline void fused_scores_backward(const ScoresParams& p, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? scores_backward_pass<double>(p, pool) : scores_backward_pass<float>(p, pool);
}
inline void fused_masked_softmax(const SoftmaxParams& p, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? masked_softmax_pass<double>(p, pool) : masked_softmax_pass<float>(p, pool);
}
inline void fused_masked_softmax_backward(const SoftmaxParams& p, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? masked_softmax_backward_pass<double>(p, pool)
                             : masked_softmax_backward_pass<float>(p, pool);
}

constexpr Kernel fused_kernel(const char* isa, const char* description) {
  Kernel kernel{};
  kernel.name = "fused";
  kernel.isa = isa;
  kernel.description = description;
  kernel.automatic = true;
  kernel.forward = fused_forward;
  kernel.weights = fused_weights;
  kernel.backward_workspace = fused_backward_workspace;
  kernel.backward = fused_backward;
  kernel.captured_gradients = fused_captured_gradients;
  kernel.jvp = fused_jvp;
  kernel.backward_backward_workspace = fused_backward_backward_workspace;
  kernel.backward_backward = fused_backward_backward;
  kernel.scores = fused_scores;
  kernel.scores_backward = fused_scores_backward;
  kernel.masked_softmax = fused_masked_softmax;
  kernel.masked_softmax_backward = fused_masked_softmax_backward;
  kernel.options = kFusedOptions;
  return kernel;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
