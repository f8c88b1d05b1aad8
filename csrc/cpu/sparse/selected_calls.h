// The calls that a pass over selected keys makes of one: itself, or one for each element of a batch whose
// elements differ in length.
#pragma once

#include "../joint_task.h"
#include "lists.h"

namespace selfattn::cpu {

template <class Results>
struct SelectedCall {
  AttentionParams params;
  Results results;
  int64_t first_row;  // where its row statistics begin among those of the whole call
};

// Returns the calls that have the kind of tiles that the selection asks for, those with the most work first.
template <class Results>
std::vector<SelectedCall<Results>> selected_calls(const AttentionParams& p, const Results& results) {
  std::vector<SelectedCall<Results>> calls;
  const auto add = [&](const AttentionParams& params, const Results& of_params, int64_t first_row) {
    const bool of_blocks = goes_by_blocks(params);
    const Selection::Tiles left_out = of_blocks ? Selection::Tiles::kOfHeads : Selection::Tiles::kOfBlocks;
    if (p.selection.tiles != left_out) calls.push_back({params, of_params, first_row});
  };
  if (!p.sequences.any()) {
    add(p, results, 0);
    return calls;
  }
  for (const int64_t b : elements_by_work(p, 1, kAnyQueries)) {
    add(element_of(p, b), element_of(results, p, b), first_row_of(p, b));
  }
  return calls;
}

}  // namespace selfattn::cpu
