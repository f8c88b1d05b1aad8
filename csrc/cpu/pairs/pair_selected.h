// Selected keys by pairs. A kernels_*.cpp includes this file after the engine.
#pragma once

#include "pair_passes.h"

#include "decode_by_vectors.h"
#include "gradients_of_pairs.h"

#include "../sparse/backward.h"
#include "../sparse/forward.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Numbers of one piece are multiplied by pairs where tiles have some queries: splitting others, or keys that
// meet few queries, would take longer than it saves. Forward and backward of a call decide alike.
inline bool selects_by_pairs(const AttentionParams& p) {
  constexpr int64_t kFewestHeads = 8;
  const int64_t heads = smaller(p.heads / p.kv_heads, p.selection.heads_per_list);
  return multiplies_pairs(p) && Pairs::pieces(p) == 1 && (goes_by_blocks(p) || heads >= kFewestHeads);
}

void pair_selected_forward(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  // As in decoding, few heads need nothing converted.
  if (goes_by_rows(p) && decodes_pairs(p)) return selected_forward_by_rows<VectorPairs>(p, o, pool);
  if (!selects_by_pairs(p)) return kFusedAvx512.selected_forward(p, o, pool);
  selected_forward<Pairs>(p, o, pool);
}

size_t pair_selected_backward_workspace(const AttentionParams& p) {
  return selects_by_pairs(p) ? selected_backward_workspace<Pairs>(p)
                             : kFusedAvx512.selected_backward_workspace(p);
}

void pair_selected_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  if (!selects_by_pairs(p)) return kFusedAvx512.selected_backward(p, a, pool);
  selected_backward<Pairs>(p, a, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
