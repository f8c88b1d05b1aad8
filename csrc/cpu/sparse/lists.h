// The lists of selected keys as kernels walk through them: from a query to its keys, and from a block of keys
// to its queries.
#pragma once

#include <algorithm>
#include <vector>

#include "../../core/attention_params.h"
#include "../../core/integers.h"

namespace selfattn::cpu {

// For each block of keys the rows of a selection that hold it, ascending.
struct InverseLists {
  std::vector<int64_t> end;   // [blocks + 1] where the rows of a block end; those of block b begin at end[b]
  std::vector<int32_t> rows;  // of all blocks

  // Takes the rows first .. last - 1. It counts the rows of each block, and then fills them in.
  void build(const Selection& selection, int64_t batch, int64_t head, int64_t first, int64_t last,
             int64_t blocks) {
    end.assign(static_cast<size_t>(blocks + 1), 0);
    const auto each = [&](const auto& visit) {
      for (int64_t row = first; row < last; ++row) {
        const int32_t* list = selection.row(batch, head, row);
        for (int64_t i = 0; i < selection.longest && list[i] >= 0; ++i) visit(row, list[i]);
      }
    };
    each([&](int64_t, int32_t block) { ++end[static_cast<size_t>(block + 1)]; });
    for (int64_t block = 0; block < blocks; ++block) end[block + 1] += end[block];
    rows.resize(static_cast<size_t>(end[blocks]));
    // Filling moves the end of each block from where it begins to where it ends, one place early.
    std::vector<int64_t> next(end.begin(), end.end() - 1);
    each([&](int64_t row, int32_t block) { rows[next[block]++] = static_cast<int32_t>(row); });
  }
  const int32_t* begin_of(int64_t block) const { return rows.data() + end[block]; }
  const int32_t* end_of(int64_t block) const { return rows.data() + end[block + 1]; }
};

// A list of selected blocks, without those that a walk through it in ascending order has left behind. A query
// goes through its list in many short ranges, so places are searched from where the last range ended.
struct SelectedList {
  const int32_t *next, *end;

  // Returns how many of the next numbers are below `limit`. Those that are not there, -1, are not. It looks
  // further and further ahead, and then back by halves: places are near in one walk, and far when it begins.
  int64_t count_below(int64_t limit) const {
    const auto is_below = [&](int32_t number) { return static_cast<uint32_t>(number) < limit; };
    int64_t step = 16, known = 0;
    const int64_t count = end - next;
    for (; known + step <= count && is_below(next[known + step - 1]); step *= 2) known += step;
    return std::partition_point(next + known, next + smaller(known + step, count), is_below) - next;
  }
  void skip_below(int64_t limit) { next += count_below(limit); }
};

inline int64_t blocks_of(const AttentionParams& p) { return divide_up(p.keys, p.selection.key_size); }

// Tells whether tiles are made of a block of keys and the queries that see it, and not of a query's heads and
// the keys that it sees: blocks must have some keys, and more queries than a group has heads. It depends on
// shapes alone; but a row of a tile of queries gets other bits than one of heads.
inline bool goes_by_blocks(const AttentionParams& p) {
  constexpr int64_t kLeastKeys = 16;
  const Selection& s = p.selection;
  const int64_t queries_of_block = p.queries * s.longest / larger(blocks_of(p), 1);
  const int64_t heads = smaller(p.heads / larger(p.kv_heads, 1), s.heads_per_list);
  return !p.batch_invariant && s.key_size >= kLeastKeys && queries_of_block >= larger(2 * heads, 8);
}

}  // namespace selfattn::cpu
