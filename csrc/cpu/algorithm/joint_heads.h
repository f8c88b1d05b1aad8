// Caches whose heads lie inside, (batch, keys, heads, dim) in memory: the rows of one head are far apart,
// each too short to read fast. Decoding then takes several kv heads at once, a step of keys for one head
// after the other, and meanwhile asks for the next step in the order of memory.
#pragma once

#include "paged_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kHeadStep = 16;  // keys

inline bool heads_inside(const AttentionParams& p) { return p.key.stride[1] < p.key.stride[2]; }

// How many kv heads an item takes: as many as leave the threads enough items. Results do not depend on it.
inline int64_t heads_of_item(const AttentionParams& p, int64_t chunks, int threads) {
  constexpr int64_t kShortRow = 256;  // bytes; longer ones are read as fast by themselves
  constexpr int64_t kMostRows = 64;   // whose scores stay in the level-2 cache
  if (!heads_inside(p) || p.head_dim * size_of(p.dtype) > kShortRow) return 1;
  const int64_t rows_per_head = p.heads / p.kv_heads * p.queries;
  int64_t heads = p.kv_heads;
  while (heads > 1 && (p.kv_heads % heads != 0 || heads * rows_per_head > kMostRows ||
                       p.kv_heads / heads * chunks < 4 * threads)) {
    --heads;
  }
  return heads;
}

struct HeadStep {
  const char *address[kHeadStep], *next[kHeadStep];

  // Rows first .. first + count - 1 of the list `all`, which is that of the item's first head, for another
  // one.
  ThinRows rows(const View& view, const ThinRows& all, int64_t first, int64_t count, int64_t head,
                int64_t heads) {
    const int64_t stride = view.stride[1] * size_of(all.dtype);
    const char* const* later = all.address + first + count;
    int64_t next_head = head * count % heads;
    later += head * count / heads;
    for (int64_t j = 0; j < count; ++j) {
      address[j] = all.address[first + j] + head * stride;
      next[j] = *later + next_head * stride;
      if (++next_head == heads) {
        next_head = 0;
        ++later;
      }
    }
    return {all.dtype, nullptr, 0, address, next};
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
