// The batch element that a block works on: its lengths, and where its rows lie in tensors.
//
// Blocks keep this instead of a whole element_of(), which would not fit into registers. For calls without
// sequences it holds the call's own numbers. The lengths and places that are read here have not been checked.
// They are limited such that no value makes a kernel read or write outside of the tensors; apart from that,
// results with wrong numbers are arbitrary.
#pragma once

#include "../../core/sequences.h"
#include "../../core/visible_range.h"
#include "device.cuh"

namespace selfattn::cuda {

struct Sequence {
  int64_t batch;  // the element's own number, which masks, slopes, sinks, weights and dropout use
  int64_t queries, keys;
  int64_t query_offset;
  // The element of a tensor's batch, 0 for packed tensors, and the first row there. Keys in pages have
  // neither; see PagedRow.
  int64_t query_batch, key_batch;
  int64_t first_query, first_key;
};

__device__ __forceinline__ Sequence sequence_of(const AttentionParams& p, int64_t batch) {
  Sequence s{batch, p.queries, p.keys, p.query_offset, batch, batch, 0, 0};
  if (!p.sequences.any()) return s;
  const auto queries = queries_of(p, batch), keys = keys_of(p, batch);
  s.queries = queries.count;
  s.first_query = queries.first;
  s.keys = keys.count;
  s.first_key = keys.first;
  if (p.sequences.query_starts != nullptr) s.query_batch = 0;
  if (p.sequences.key_starts != nullptr) s.key_batch = 0;
  if (p.sequences.query_offsets != nullptr) {
    // csrc/ops has the same limit for offsets; sums with positions and windows are exact below it.
    constexpr int64_t kMost = int64_t{1} << 40;
    s.query_offset = limited(p.sequences.query_offsets[batch], -kMost, kMost);
  }
  return s;
}

// The index of a head's query 0 in arrays of row statistics; the other queries follow.
__device__ __forceinline__ int64_t first_statistic_of(const AttentionParams& p, const Sequence& s,
                                                      int64_t head) {
  return p.row(s.query_batch, head, s.first_query);
}

// The index of key 0 in arrays of a number per query head and key; the other keys follow.
__device__ __forceinline__ int64_t first_key_number(const AttentionParams& p, const Sequence& s,
                                                    int64_t head) {
  return p.key_place(p.sequences.key_starts != nullptr ? 0 : s.batch, head, s.first_key);
}

// The positions in the form of core/visible_range.h.
__device__ __forceinline__ Positions positions_of(const AttentionParams& p, const Sequence& s) {
  return {s.queries, s.keys, s.query_offset, p.window_left, p.window_right};
}

// Query i sees the keys i + begin .. i + end - 1, as far as these exist.
struct SeenKeys {
  int begin, end;
};

// The numbers have 32 bits to save registers. The limits change nothing, because no two indices below 2^30
// are so far apart.
__device__ __forceinline__ SeenKeys seen_keys(const AttentionParams& p, const Sequence& s) {
  constexpr int64_t kFar = int64_t{1} << 30;
  const int64_t begin = p.window_left >= 0 ? s.query_offset - p.window_left : -kFar;
  const int64_t end = p.window_right >= 0 ? s.query_offset + p.window_right + 1 : kFar;
  return {static_cast<int>(limited(begin, -kFar, kFar)), static_cast<int>(limited(end, -kFar, kFar))};
}

// The place of a key in pages: a page, and a row of it.
struct PagedRow {
  int64_t page, row;
};

// `key` must lie below the sequence's keys. Kernels with 32-bit indices use a 32-bit division.
template <class Index>
__device__ __forceinline__ PagedRow paged_row(const Pages& pages, int64_t batch, Index key) {
  const Index size = static_cast<Index>(pages.size);
  const Index page = key / size;
  return {limited(pages.table[batch * pages.stride + page], 0, pages.count - 1), key - page * size};
}

}  // namespace selfattn::cuda
