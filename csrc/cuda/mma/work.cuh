// The work of a block of the forward: which rows of which heads it computes, against which keys.
#pragma once

#include "../common/element.cuh"
#include "../common/sequence.cuh"
#include "forward_plan.h"

namespace selfattn::cuda::mma {

// Sizes and indices have 32 bits here (see refuses() in sm80.cpp), offsets into tensors 64.
struct RowOf {
  int head;
  int query;
};

// The number that row() needs in a kernel whose plan may tell it to fold: its rows are then the queries of
// all query heads of a kv head, one after another. The few-query path always folds, and the other paths of
// sm80 never do.
template <bool kMay>
struct Fold {};
template <>
struct Fold<true> {
  // The next integer above 2^16 / queries; 0 where nothing is folded. It fills a gap between other numbers:
  // with 8 bytes more in Work, ptxas runs out of uniform registers in the loop of sm90 at 128 dims.
  uint16_t reciprocal = 0;
};

// Work lies in shared memory: numbers that are needed once per tile should not fill registers in between.
template <class C>
struct Work {
  int batch, kv_head, split;
  int splits;                  // how many parts the sequence's keys are cut into
  int queries, keys;           // how many the sequence has
  int first_head;              // the unit's; where Fold folds, the tile's
  int first_row;               // the tile's, counted in the unit; where Fold folds, in the first head
  int rows;                    // how many of the tile exist; 0 if the block has nothing to do
  int begin, end;              // the keys that some row may see
  int first_tile;              // the tile of `begin`; tiles are visited from the last to this one
  int whole_begin, whole_end;  // the keys that every row sees by its position
  int first_whole_tile;        // the first with such keys alone, not counting the last tile to be visited
  bool careful = false;        // NaN and Inf of values are looked for
  Fold<C::kMayFold> fold;
  int64_t seen_begin, seen_end;    // query i sees keys i + seen_begin .. i + seen_end - 1, if they exist
  int64_t query_offset;            // the sequence's
  int64_t query_start, key_start;  // where the sequence begins in packed tensors
  int64_t first_statistic;         // the first head's
  const void* first_key;           // the kv head's, in the sequence or in the first page
  const void* first_value;

  // `block` counts row tiles first, so that blocks which run together share keys and values in the cache. The
  // last tile, which sees most under a causal mask, starts first. The grid is that of the longest sequence.
  __device__ __forceinline__ Work(const Plan& plan, int64_t block) {
    const AttentionParams& p = plan.params;
    const int tile = static_cast<int>(plan.row_tiles - 1 - block % plan.row_tiles);
    block /= plan.row_tiles;
    split = static_cast<int>(block % plan.split_launch.splits);
    const int64_t unit = block / plan.split_launch.splits;
    const bool folds = C::kFewQuery || (C::kMayFold && plan.folds);
    const int64_t units_of_batch = folds ? p.kv_heads : p.heads;
    batch = static_cast<int>(plan.split_launch.first_batch + unit / units_of_batch);
    first_head = static_cast<int>(unit % units_of_batch);
    const int group = static_cast<int>(p.heads / p.kv_heads);
    if (folds) {
      kv_head = first_head;
      first_head *= group;
    } else {
      kv_head = first_head / group;
    }

    const Sequence sequence = sequence_of(p, batch);
    const Positions positions = positions_of(p, sequence);
    queries = static_cast<int>(sequence.queries);
    keys = static_cast<int>(sequence.keys);
    query_offset = sequence.query_offset;
    query_start = sequence.first_query;
    key_start = sequence.first_key;
    first_statistic = first_statistic_of(p, sequence, first_head);
    first_key = first_row_of(p, p.key);
    first_value = first_row_of(p, p.value);

    first_row = tile * C::kRows;
    rows = min(queries * (folds ? group : 1) - first_row, C::kRows);
    const Splits<uint32_t> cuts = C::kFewQuery ? splits_of(static_cast<uint32_t>(keys))
                                               : Splits<uint32_t>{1, static_cast<uint32_t>(keys)};
    splits = cuts.count;
    if (split >= splits) rows = 0;

    // Folded rows may be any queries of their heads.
    const int first = folds ? 0 : first_row;
    const int last = (folds ? queries : first_row + rows) - 1;
    const KeyRange range = visible_keys(positions, first, last);
    const int64_t from = static_cast<int64_t>(split) * cuts.keys, to = from + cuts.keys;
    begin = static_cast<int>(max(range.begin, from));
    end = static_cast<int>(min(range.end, to));
    first_tile = begin / C::kKeys;

    // Windows move with the query: that of the first ends earliest, that of the last begins latest.
    const int64_t first_end = visible_keys(positions, first, first).end;
    whole_begin = static_cast<int>(visible_keys(positions, last, last).begin);
    whole_end = static_cast<int>(min(first_end, int64_t{end}));
    first_whole_tile = max(first_tile + 1, static_cast<int>(divide_up(whole_begin, C::kKeys)));
    constexpr int64_t kFar = int64_t{1} << 62;
    seen_begin = p.window_left >= 0 ? query_offset - p.window_left : -kFar;
    seen_end = p.window_right >= 0 ? query_offset + p.window_right + 1 : kFar;
    if constexpr (C::kMayFold) {
      if (folds) begin_in_head(p);
    }
  }

  // The first row is counted from its own head on, so that all rows of the tile are below 2 * 128. Then a
  // product with the reciprocal tells their heads, while a division for each would cost time.
  __device__ __forceinline__ void begin_in_head(const AttentionParams& p) {
    static_assert(C::kRows <= 128, "heads that are folded have fewer queries");
    const int of_head = max(queries, static_cast<int>(kFewQueries) + 1);  // fewer take another path
    const int heads = first_row / of_head;
    first_head += heads;
    first_row -= heads * of_head;
    first_statistic += heads * p.rows_per_head;
    fold.reciprocal = static_cast<uint16_t>((1 << 16) / of_head + 1);
  }

  __device__ __forceinline__ const void* first_row_of(const AttentionParams& p, const View& view) const {
    const bool paged = p.pages.table != nullptr;
    using Storage = typename Element<C::kDType>::Storage;
    return static_cast<const Storage*>(view.data) +
           view.offset(paged ? 0 : batch, kv_head, paged ? 0 : key_start);
  }

  // Rows beyond the last stand for the last, so that what is read for them exists.
  __device__ __forceinline__ RowOf row(int row_of_tile) const {
    const int r = first_row + min(row_of_tile, rows - 1);
    if constexpr (C::kMayFold) {
      const int heads = r * fold.reciprocal >> 16;
      return {first_head + heads, r - heads * queries};
    }
    if (!C::kFewQuery) return {first_head, r};
    return {first_head + r / queries, r % queries};
  }

  // The place of a row in tensors like the query, and in arrays of row statistics.
  __device__ __forceinline__ int64_t offset(const View& view, RowOf row) const {
    return view.offset(batch, row.head, query_start + row.query);
  }
  __device__ __forceinline__ int64_t statistic(const AttentionParams& p, RowOf row) const {
    return first_statistic + (row.head - first_head) * p.rows_per_head + row.query;
  }
};

// One key or value of the block's head; `first` is first_key or first_value of Work.
template <class Storage, class C>
__device__ __forceinline__ const Storage* key_row(const AttentionParams& p, const View& view,
                                                  const void* first, const Work<C>& work, int key) {
  const auto* rows = static_cast<const Storage*>(first);
  if (p.pages.table == nullptr) return rows + key * view.stride[2];
  const PagedRow at = paged_row(p.pages, work.batch, static_cast<uint32_t>(key));
  return rows + at.page * view.stride[0] + at.row * view.stride[2];
}

}  // namespace selfattn::cuda::mma
