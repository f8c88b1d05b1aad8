// Entry points of an instruction set that multiplies pairs of bfloat16 numbers. Calls that gain nothing by
// pairs go to kFusedAvx512. A kernels_*.cpp includes this file last, after exact_by_vectors.h or
// exact_by_tiles.h.
#pragma once

#include "pair_calls.h"

#include "gradients_of_pairs.h"

#include "../fused/backward.h"
#include "../fused/backward_backward.h"
#include "../fused/captured_gradient.h"
#include "../fused/forward.h"
#include "../fused/jvp.h"
#include "../fused/weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A call with at least this many queries is computed by pairs, if pairs multiply its numbers at all. Keys and
// values must be split into pieces, and only queries share that cost; the numbers of keys and dims matter
// little. With batch_invariant, the number of queries must not choose the arithmetic of a row, so any number
// will do.
struct GainingCalls {
  static int64_t fewest_queries(const AttentionParams& p) {
    constexpr int64_t kByPieces[] = {kFewQueries + 1, 17, 129};  // measured: docs/performance-lessons.md
    if (!multiplies_pairs(p)) return kAnyQueries;
    return p.batch_invariant ? 0 : kByPieces[Pairs::pieces(p) - 1];
  }
};
struct AllCalls {
  static int64_t fewest_queries(const AttentionParams& p) {
    if (!multiplies_pairs(p)) return kAnyQueries;
    return p.batch_invariant ? 0 : kFewQueries + 1;
  }
};

// Computes calls with few queries; defined in pair_decode.h.
void pair_decode(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool);

// `Calls` is GainingCalls or AllCalls.
template <class Calls>
void pair_forward(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  const int64_t fewest = Calls::fewest_queries(p), decoded = most_decoded(p);
  if (!p.sequences.any()) {
    if (p.queries <= decoded) return pair_decode(p, o, pool);
    return p.queries < fewest ? kFusedAvx512.forward(p, o, pool) : forward_pass<Pairs>(p, o, pool);
  }
  if (p.queries >= fewest) forward_pass<Pairs>(elements_with(p, fewest, kAnyQueries), o, pool);
  if (p.queries > decoded && fewest > decoded + 1) {
    kFusedAvx512.forward(elements_with(p, decoded + 1, fewest - 1), o, pool);
  }
  pair_decode(elements_with(p, 0, decoded), o, pool);
}
// Runs a pass by pairs for calls, or elements of a batch, with at least `fewest` queries, and in float for
// all others. The two kernels run one after the other, each on all threads.
template <class ByPairs, class InFloat>
void divide(const AttentionParams& p, int64_t fewest, const ByPairs& by_pairs, const InFloat& in_float) {
  if (p.queries < fewest) return in_float(p);
  if (!p.sequences.any()) return by_pairs(p);
  by_pairs(elements_with(p, fewest, kAnyQueries));
  in_float(elements_with(p, 0, fewest - 1));
}
// The workspace of such a pass: the two kernels run in turn and share it.
template <class ByPairs, class InFloat>
size_t larger_workspace(const AttentionParams& p, int64_t fewest, const ByPairs& by_pairs,
                        const InFloat& in_float) {
  size_t bytes = 0;
  divide(
      p, fewest, [&](const AttentionParams& some) { bytes = std::max(bytes, by_pairs(some)); },
      [&](const AttentionParams& some) { bytes = std::max(bytes, in_float(some)); });
  return bytes;
}

template <class Calls>
void pair_weights(const AttentionParams& p, const WeightsOutputs& o, const ThreadPool& pool) {
  divide(
      p, Calls::fewest_queries(p), [&](const AttentionParams& some) { weights_pass<Pairs>(some, o, pool); },
      [&](const AttentionParams& some) { kFusedAvx512.weights(some, o, pool); });
}
template <class Calls>
size_t pair_backward_workspace(const AttentionParams& p) {
  return larger_workspace(p, Calls::fewest_queries(p), backward_workspace<Pairs>,
                          kFusedAvx512.backward_workspace);
}
template <class Calls>
void pair_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  divide(
      p, Calls::fewest_queries(p), [&](const AttentionParams& some) { backward_pass<Pairs>(some, a, pool); },
      [&](const AttentionParams& some) { kFusedAvx512.backward(some, a, pool); });
}
template <class Calls>
void pair_captured_gradients(const AttentionParams& p, const BackwardArguments& a, const CapturedGradients& g,
                             const ThreadPool& pool) {
  divide(
      p, Calls::fewest_queries(p),
      [&](const AttentionParams& some) { captured_gradients<Pairs>(some, a, g, pool); },
      [&](const AttentionParams& some) { kFusedAvx512.captured_gradients(some, a, g, pool); });
}

// Tangents of a call with at least this many queries are computed by ExactPairs.
template <class Calls>
int64_t fewest_moving_queries(const AttentionParams& p) {
  return p.dtype == DType::kBFloat16 ? Calls::fewest_queries(p) : kAnyQueries;
}
template <class Calls>
void pair_jvp(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool) {
  divide(
      p, fewest_moving_queries<Calls>(p),
      [&](const AttentionParams& some) { jvp_pass<ExactPairs>(some, a, pool); },
      [&](const AttentionParams& some) { kFusedAvx512.jvp(some, a, pool); });
}
template <class Calls>
size_t pair_backward_backward_workspace(const AttentionParams& p) {
  return larger_workspace(p, fewest_moving_queries<Calls>(p), backward_backward_workspace<ExactPairs>,
                          kFusedAvx512.backward_backward_workspace);
}
template <class Calls>
void pair_backward_backward(const AttentionParams& p, const BackwardBackwardArguments& a,
                            const ThreadPool& pool) {
  divide(
      p, fewest_moving_queries<Calls>(p),
      [&](const AttentionParams& some) { backward_backward_pass<ExactPairs>(some, a, pool); },
      [&](const AttentionParams& some) { kFusedAvx512.backward_backward(some, a, pool); });
}

inline void pair_scores(const ScoresParams& p, const ThreadPool& pool) { kFusedAvx512.scores(p, pool); }
inline void pair_scores_backward(const ScoresParams& p, const ThreadPool& pool) {
  kFusedAvx512.scores_backward(p, pool);
}
inline void pair_masked_softmax(const SoftmaxParams& p, const ThreadPool& pool) {
  kFusedAvx512.masked_softmax(p, pool);
}
inline void pair_masked_softmax_backward(const SoftmaxParams& p, const ThreadPool& pool) {
  kFusedAvx512.masked_softmax_backward(p, pool);
}

template <class Calls>
const Kernel* pair_hands_on_to(const AttentionParams& p) {
  const bool decodes = p.queries <= most_decoded(p) && (PairEngine::kDecodesDirect || decodes_pairs(p));
  return p.queries >= Calls::fewest_queries(p) || decodes ? nullptr : &kFusedAvx512;
}

template <class Calls>
constexpr Kernel pair_kernel(const char* isa, const char* description, const Kernel* when_forced = nullptr) {
  Kernel kernel{};
  kernel.name = "fused";
  kernel.isa = isa;
  kernel.description = description;
  kernel.automatic = true;
  kernel.forward = pair_forward<Calls>;
  kernel.weights = pair_weights<Calls>;
  kernel.backward_workspace = pair_backward_workspace<Calls>;
  kernel.backward = pair_backward<Calls>;
  kernel.captured_gradients = pair_captured_gradients<Calls>;
  kernel.jvp = pair_jvp<Calls>;
  kernel.backward_backward_workspace = pair_backward_backward_workspace<Calls>;
  kernel.backward_backward = pair_backward_backward<Calls>;
  kernel.scores = pair_scores;
  kernel.scores_backward = pair_scores_backward;
  kernel.masked_softmax = pair_masked_softmax;
  kernel.masked_softmax_backward = pair_masked_softmax_backward;
  kernel.hands_on_to = pair_hands_on_to<Calls>;
  kernel.options = kFusedOptions;
  kernel.when_forced = when_forced;
  return kernel;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
