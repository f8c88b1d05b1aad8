// Entry points of an instruction set that multiplies pairs of bfloat16 numbers. Calls that gain nothing by
// pairs go to kFusedAvx512. A kernels_*.cpp includes this file last.
#pragma once

#include "pair_passes.h"

#include "../fused/forward.h"
#include "../fused/weight_sums.h"
#include "../fused/weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A call with at least this many queries is computed by pairs, if pairs multiply its numbers at all. Keys and
// values must be split into pieces, and only queries share that cost; the numbers of keys and dims matter
// little. With batch_invariant, the number of queries must not choose the arithmetic of a row, so any number
// will do.
struct GainingCalls {
  static int64_t fewest_queries(const AttentionParams& p) {
    constexpr int64_t kByPieces[] = {0, 17, 129};  // measured: docs/performance-lessons.md
    if (!multiplies_pairs(p)) return kAnyQueries;
    return p.batch_invariant ? 0 : larger(most_few_queries(p) + 1, kByPieces[Pairs::pieces(p) - 1]);
  }
};
struct AllCalls {
  static int64_t fewest_queries(const AttentionParams& p) {
    if (!multiplies_pairs(p)) return kAnyQueries;
    return p.batch_invariant ? 0 : most_few_queries(p) + 1;
  }
};

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
// The entry points of such a pass, and of its workspace, which the two kernels share as they run in turn.
// `kInFloat` is a field of kFusedAvx512.
template <auto kFewest, auto kByPairs, auto kInFloat, class... Arguments>
void divided(const AttentionParams& p, const Arguments&... arguments) {
  divide(
      p, kFewest(p), [&](const AttentionParams& some) { kByPairs(some, arguments...); },
      [&](const AttentionParams& some) { (kFusedAvx512.*kInFloat)(some, arguments...); });
}
template <auto kFewest, auto kByPairs, auto kInFloat>
size_t divided_workspace(const AttentionParams& p) {
  size_t bytes = 0;
  divide(
      p, kFewest(p), [&](const AttentionParams& some) { bytes = std::max(bytes, kByPairs(some)); },
      [&](const AttentionParams& some) { bytes = std::max(bytes, (kFusedAvx512.*kInFloat)(some)); });
  return bytes;
}
// The entry point of a pass that has no products of pairs.
template <auto kInFloat, class Params>
void in_float(const Params& p, const ThreadPool& pool) {
  (kFusedAvx512.*kInFloat)(p, pool);
}

// Tangents of a call with at least this many queries are computed by ExactPairs.
template <class Calls>
int64_t fewest_moving_queries(const AttentionParams& p) {
  return p.dtype == DType::kBFloat16 ? Calls::fewest_queries(p) : kAnyQueries;
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
  constexpr auto kFewest = &Calls::fewest_queries, kFewestMoving = &fewest_moving_queries<Calls>;
  kernel.weights = divided<kFewest, weights_pass<Pairs>, &Kernel::weights>;
  kernel.weight_sums = divided<kFewest, weight_sums_pass<Pairs>, &Kernel::weight_sums>;
  kernel.backward_workspace =
      divided_workspace<kFewest, pair_backward_workspace, &Kernel::backward_workspace>;
  kernel.backward = divided<kFewest, pair_backward, &Kernel::backward>;
  kernel.captured_gradients = divided<kFewest, pair_captured_gradients, &Kernel::captured_gradients>;
  kernel.jvp = divided<kFewestMoving, pair_jvp, &Kernel::jvp>;
  kernel.backward_backward_workspace = divided_workspace<kFewestMoving, pair_backward_backward_workspace,
                                                         &Kernel::backward_backward_workspace>;
  kernel.backward_backward = divided<kFewestMoving, pair_backward_backward, &Kernel::backward_backward>;
  kernel.selected_forward = pair_selected_forward;
  kernel.selected_backward_workspace = pair_selected_backward_workspace;
  kernel.selected_backward = pair_selected_backward;
  kernel.scores = in_float<&Kernel::scores>;
  kernel.scores_backward = in_float<&Kernel::scores_backward>;
  kernel.masked_softmax = in_float<&Kernel::masked_softmax>;
  kernel.masked_softmax_backward = in_float<&Kernel::masked_softmax_backward>;
  kernel.hands_on_to = pair_hands_on_to<Calls>;
  kernel.options = kFusedOptions;
  kernel.when_forced = when_forced;
  return kernel;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
