// The size of a work item of decoding: how many keys, and of how many kv heads.
#pragma once

#include "../products/few_query_products.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kDecodeChunk = 1024;  // keys of an item
// Keys from one step of the softmax to the next. They are many, because nothing is prefetched during a
// softmax.
constexpr int64_t kDecodeBlock = 512;

// Memory is read fastest in its order. If the rows of one head are scattered, an item takes several kv heads,
// a step of keys for one head after the other, and meanwhile prefetches the next step. Rows are scattered in
//  - caches whose heads lie inside, (batch, keys, heads, dim) in memory;
//  - small pages: a step is then one page, in which all heads lie side by side, or several pages.
// It takes several heads, too, if they have very few keys, as an item's own cost would show.
inline bool heads_inside(const AttentionParams& p) { return p.key.stride[1] < p.key.stride[2]; }

// With so few keys, or if the keys of an item's only head have so few bytes, a prefetch comes too late to
// help: finding out where it is to begin takes longer than the products themselves.
constexpr int64_t kVeryFewKeys = 32, kVeryFewBytes = 8192;

// Returns the keys of a step, a multiple of `unit`; 0 if heads are as fast one by one.
inline int64_t head_step(const AttentionParams& p, int64_t unit) {
  // The longest row in bytes and the keys of a step, if heads lie inside.
  constexpr int64_t kShortRow = 512, kKeysInside = 64;
  // The bytes of a step: as much again is prefetched, and the level-1 cache holds both. If lines come into
  // the level-2 cache, a head by itself is faster, except for steps shorter than a page of memory.
  constexpr int64_t kMostBytes = kFetchInto == 3 ? 32768 : 4096;
  constexpr int64_t kLeastKeys = 32;  // with fewer, a step's own cost shows
  constexpr int64_t kFewHeads = 4;    // with fewer, a page of all heads is not much longer than that of one,
  constexpr int64_t kLongCachePage = 32768;  // unless it has as many bytes
  // The bytes of a step of all heads, if heads lie inside and their rows are so short that more keys fit.
  constexpr int64_t kInsideBytes = 32768, kMostInside = 256;
  const int64_t row = p.head_dim * size_of(p.dtype);
  if (p.keys <= kVeryFewKeys) return kVeryFewKeys;
  if (heads_inside(p)) {
    const int64_t fitting = row > 0 ? kInsideBytes / (p.kv_heads * row) : kMostInside;
    return row <= kShortRow ? limited(fitting / 32 * 32, kKeysInside, kMostInside) : 0;
  }
  if (p.pages.table == nullptr || p.kv_heads == 1) return 0;
  if (p.kv_heads < kFewHeads && p.kv_heads * p.pages.size * row < kLongCachePage) return 0;
  int64_t step = p.pages.size;
  if (step < kLeastKeys) step *= divide_up(kLeastKeys, step);
  while (step % unit != 0 && step <= kDecodeBlock) step += p.pages.size;
  return step <= kDecodeBlock && step * row <= kMostBytes ? step : 0;
}

// The size of an item: as much as leaves the threads enough items. Results do not depend on it.
struct DecodeItem {
  int64_t heads;   // kv heads; they divide all kv heads
  int64_t chunks;  // neighbours of the same heads, read without a pause

  // `step` is head_step; `all_chunks` counts those of all sequences, for one kv head.
  static DecodeItem of(const AttentionParams& p, int64_t step, int64_t all_chunks, int threads) {
    // The scores of so many rows stay in the level-2 cache, or in the level-1 cache.
    const int64_t most_rows = p.keys > kVeryFewKeys ? 64 : 16;
    constexpr int64_t kMostChunks = 8;  // with so many, the pause between two items hardly shows
    const int64_t least_items = threads > 1 ? 2 * threads : 1,
                  rows_per_head = p.heads / p.kv_heads * p.queries;
    DecodeItem item{step == 0 ? 1 : p.kv_heads, 1};
    while (item.heads > 1 && (p.kv_heads % item.heads != 0 || item.heads * rows_per_head > most_rows ||
                              p.kv_heads / item.heads * all_chunks < least_items)) {
      --item.heads;
    }
    while (item.chunks < kMostChunks &&
           p.kv_heads / item.heads * all_chunks >= 2 * item.chunks * least_items) {
      item.chunks *= 2;
    }
    return item;
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
