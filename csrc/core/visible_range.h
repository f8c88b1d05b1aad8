// The keys that a query may see by its position: causal and sliding windows, without masks.
#pragma once

#include <cstdint>

#include "attention_params.h"
#include "integers.h"

namespace selfattn {

// Keys begin .. end - 1; empty when end <= begin.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

inline SELFATTN_HOST_DEVICE int64_t clamp_key(int64_t key, int64_t keys) { return limited(key, 0, keys); }

// The numbers that the rule depends on, of a call or of one element of its batch.
struct Positions {
  int64_t queries, keys, query_offset, window_left, window_right;
};

inline SELFATTN_HOST_DEVICE Positions positions_of(const AttentionParams& p) {
  return {p.queries, p.keys, p.query_offset, p.window_left, p.window_right};
}

// Returns the keys that some query of [first, last] may see. For one query, pass it twice.
// csrc/ops bounds offsets and windows far below overflow, so the sums are exact.
inline SELFATTN_HOST_DEVICE KeyRange visible_keys(const Positions& p, int64_t first, int64_t last) {
  KeyRange range{0, p.keys};
  if (p.window_left >= 0) range.begin = clamp_key(first + p.query_offset - p.window_left, p.keys);
  if (p.window_right >= 0) range.end = clamp_key(last + p.query_offset + p.window_right + 1, p.keys);
  return range;
}
inline SELFATTN_HOST_DEVICE KeyRange visible_keys(const AttentionParams& p, int64_t first, int64_t last) {
  return visible_keys(positions_of(p), first, last);
}

// Queries begin .. end - 1; empty when end <= begin.
struct QueryRange {
  int64_t begin;
  int64_t end;
};

// Returns the queries that may see some key of [first, last], the inverse of visible_keys.
inline SELFATTN_HOST_DEVICE QueryRange visible_queries(const Positions& p, int64_t first, int64_t last) {
  QueryRange range{0, p.queries};
  if (p.window_right >= 0) range.begin = clamp_key(first - p.window_right - p.query_offset, p.queries);
  if (p.window_left >= 0) range.end = clamp_key(last + p.window_left - p.query_offset + 1, p.queries);
  return range;
}
inline SELFATTN_HOST_DEVICE QueryRange visible_queries(const AttentionParams& p, int64_t first,
                                                       int64_t last) {
  return visible_queries(positions_of(p), first, last);
}

}  // namespace selfattn
