// Selected keys by pairs. A kernels_*.cpp includes this file after the engine.
#pragma once

#include "pair_passes.h"

#include "decode_by_vectors.h"
#include "gradients_of_pairs.h"

#include "../sparse/backward.h"
#include "../sparse/forward.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Numbers of one piece are multiplied by pairs where tiles have some queries: splitting others, or keys that
// meet few queries, would take longer than it saves. Forward and backward of a call decide alike, and so do
// elements of a batch that differ in length: function(params, by_pairs) gets them by the kind of their tiles.
template <class Function>
void each_selected(const AttentionParams& p, const Function& function) {
  constexpr int64_t kFewestHeads = 8;
  const int64_t heads = smaller(p.heads / p.kv_heads, p.selection.heads_per_list);
  const bool pairs = multiplies_pairs(p) && Pairs::pieces(p) == 1;
  if (!pairs || heads >= kFewestHeads) return function(p, pairs);
  AttentionParams some = p;
  some.selection.tiles = Selection::Tiles::kOfBlocks;
  function(some, true);
  some.selection.tiles = Selection::Tiles::kOfHeads;
  function(some, false);
}

void pair_selected_forward(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  each_selected(p, [&](const AttentionParams& some, bool by_pairs) {
    if (by_pairs) return selected_forward<Pairs>(some, o, pool);
    // As in decoding, few heads need nothing converted.
    if (decodes_pairs(some) && has_few_heads(some)) {
      return selected_forward_by_rows<VectorPairs>(selected_calls(some, o), pool);
    }
    kFusedAvx512.selected_forward(some, o, pool);
  });
}

// The rows of the workspace are those of the whole call, in floats either way.
size_t pair_selected_backward_workspace(const AttentionParams& p) {
  return kFusedAvx512.selected_backward_workspace(p);
}

void pair_selected_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  each_selected(p, [&](const AttentionParams& some, bool by_pairs) {
    by_pairs ? selected_backward<Pairs>(some, a, pool) : kFusedAvx512.selected_backward(some, a, pool);
  });
}

}  // namespace selfattn::cpu::SELFATTN_ISA
