// The passes by pairs that may be compiled in sources of their own: in one, those of AMX would take so long
// to compile that every parallel build would wait for it.
#pragma once

#include "pair_calls.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Calls with few queries: pair_decode.h.
void pair_decode(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool);

// First derivatives: pair_backward.h.
size_t pair_backward_workspace(const AttentionParams& p);
void pair_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool);
void pair_captured_gradients(const AttentionParams& p, const BackwardArguments& a, const CapturedGradients& g,
                             const ThreadPool& pool);

// Selected keys: pair_selected.h.
void pair_selected_forward(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool);
size_t pair_selected_backward_workspace(const AttentionParams& p);
void pair_selected_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool);

// Forward mode and second derivatives: pair_tangents.h.
void pair_jvp(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool);
size_t pair_backward_backward_workspace(const AttentionParams& p);
void pair_backward_backward(const AttentionParams& p, const BackwardBackwardArguments& a,
                            const ThreadPool& pool);

}  // namespace selfattn::cpu::SELFATTN_ISA
