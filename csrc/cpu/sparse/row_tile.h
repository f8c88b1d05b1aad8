// Tiles of few heads: those of a query meet the keys that it sees as in decoding, each in a row of its own
// with the keys side by side. In a strip most lanes would be empty.
#pragma once

#include "../products/few_query_rows.h"
#include "lists.h"
#include "tile.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Returns how many query heads share lists and a kv head.
inline int64_t heads_of_list(const AttentionParams& p) {
  return smaller(p.heads / larger(p.kv_heads, 1), p.selection.heads_per_list);
}

inline bool has_few_heads(const AttentionParams& p) {
  return heads_of_list(p) <= most_few_queries(p) && scale_keeps_queries(p.scale);
}
inline bool goes_by_rows(const AttentionParams& p) { return !goes_by_blocks(p) && has_few_heads(p); }

// Lists where the rows of a tile's keys begin in a view of keys or values.
inline void list_rows(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head,
                      const TileKeys& keys, const char** rows) {
  const int64_t size = size_of(p.dtype), first = view.offset(batch, kv_head, 0), step = view.stride[2];
  for (int64_t j = 0; j < keys.count; ++j) {
    const int64_t offset = p.pages.table == nullptr
                               ? first + keys.key[j] * step
                               : offset_of_key(view, p.pages, batch, kv_head, keys.key[j]);
    rows[j] = static_cast<const char*>(view.data) + offset * size;
  }
}

// Turns a row of products into scores, -inf where hidden and, up to a whole vector, past the last key.
template <class T>
void finish_scores_of_row(const AttentionParams& p, int64_t keys, const T* bias, T* s) {
  using S = Simd<T>;
  const int64_t padded = round_up_to_vector<T>(keys);
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  const bool capped = p.softcap > 0.0;
  const auto cap = S::set(static_cast<T>(p.softcap));
  const auto inverse_cap = S::set(static_cast<T>(capped ? 1.0 / p.softcap : 0.0));
  for (int64_t j = 0; (capped || bias != nullptr) && j < padded; j += S::kWidth) {
    auto x = S::load(s + j);
    if (capped) x = S::mul(cap, tanh<T>(S::mul(x, inverse_cap)));
    if (bias != nullptr) {
      const auto b = S::load(bias + j);
      x = S::select(S::equal(b, hidden), hidden, S::add(x, b));
    }
    S::store(s + j, x);
  }
  for (int64_t j = keys; j < padded; ++j) s[j] = -std::numeric_limits<T>::infinity();
}

}  // namespace selfattn::cpu::SELFATTN_ISA
