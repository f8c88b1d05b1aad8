// Reads the map of blocks of a score function (core/score_function.h).
#pragma once

#include "../../core/score_function.h"
#include "../../core/visible_range.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Reads a block in a row of the map; the row is nullptr past the last one.
inline Seen seen_in_block(const BlockMap& map, const uint8_t* row, int64_t key_block) {
  return row == nullptr || key_block >= map.key_blocks ? Seen::kNone : static_cast<Seen>(row[key_block]);
}

inline const uint8_t* row_of_blocks(const BlockMap& map, int64_t batch, int64_t head, int64_t query_block) {
  if (query_block >= map.query_blocks) return nullptr;
  return map.blocks + batch * map.stride[0] + head * map.stride[1] + query_block * map.stride[2];
}

// Returns the keys that some query of [first, last] may see: visible_keys without what the map leaves out at
// either end. It may leave out more between them.
inline KeyRange shown_keys(const AttentionParams& p, int64_t batch, int64_t head, int64_t first,
                           int64_t last) {
  const KeyRange range = visible_keys(p, first, last);
  const BlockMap& map = p.function.map;
  if (map.blocks == nullptr) return range;
  int64_t begin = map.key_blocks, end = 0;
  for (int64_t block = first / map.query_size; block <= last / map.query_size; ++block) {
    const uint8_t* row = row_of_blocks(map, batch, head, block);
    int64_t left = 0, right = map.key_blocks;
    while (left < begin && seen_in_block(map, row, left) == Seen::kNone) ++left;
    while (right > end && seen_in_block(map, row, right - 1) == Seen::kNone) --right;
    begin = smaller(begin, left);
    end = larger(end, right);
  }
  return {larger(range.begin, begin * map.key_size), smaller(range.end, end * map.key_size)};
}

// Tells whether these queries of any head of a kv head may see any of these keys, as far as shown_keys knows.
inline bool some_head_sees(const AttentionParams& p, int64_t batch, int64_t kv_head, QueryRange queries,
                           KeyRange keys) {
  const int64_t group = p.heads / p.kv_heads, end = (kv_head + 1) * group;
  for (int64_t head = kv_head * group; head < end; ++head) {
    const KeyRange seen = shown_keys(p, batch, head, queries.begin, queries.end - 1);
    if (larger(seen.begin, keys.begin) < smaller(seen.end, keys.end)) return true;
    if (p.function.map.blocks == nullptr) break;  // the others are no different
  }
  return false;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
