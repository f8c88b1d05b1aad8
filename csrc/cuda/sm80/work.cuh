// What a block computes: which rows of which heads, against which keys.
#pragma once

#include "../../core/visible_range.h"
#include "config.cuh"
#include "plan.h"

namespace selfattn::cuda::sm80 {

// Sizes and indices have 32 bits here (see refuses() in sm80.cpp), offsets into tensors 64.
struct RowOf {
  int head;
  int query;
};

// Lies in shared memory: what is asked for once a tile should not fill registers in between.
template <class C>
struct Work {
  int batch, kv_head, split;
  int first_head;                // of the unit
  int first_row;                 // of the tile, in the unit
  int rows;                      // of the tile that exist
  int begin, end;                // keys that some row may see
  int whole_begin, whole_end;    // keys that every row sees by its position
  int64_t seen_begin, seen_end;  // query i sees the keys i + seen_begin .. i + seen_end - 1 of these

  // `block` counts row tiles first, so that blocks which run together share keys and values in the cache; the
  // last tile, which sees most under a causal mask, starts first.
  __device__ __forceinline__ Work(const Plan& plan, int64_t block) {
    const AttentionParams& p = plan.params;
    const int tile = static_cast<int>(plan.row_tiles - 1 - block % plan.row_tiles);
    block /= plan.row_tiles;
    split = static_cast<int>(block % plan.splits);
    const int64_t unit = block / plan.splits;
    const int64_t units_of_batch = C::kThin ? p.kv_heads : p.heads;
    batch = static_cast<int>(unit / units_of_batch);
    first_head = static_cast<int>(unit % units_of_batch);
    const int group = static_cast<int>(p.heads / p.kv_heads);
    if (C::kThin) {
      kv_head = first_head;
      first_head *= group;
    } else {
      kv_head = first_head / group;
    }
    first_row = tile * C::kRows;
    rows = min(static_cast<int>(plan.unit_rows) - first_row, C::kRows);

    // Rows of thin calls may be any queries of their heads.
    const KeyRange range =
        C::kThin ? visible_keys(p, 0, p.queries - 1) : visible_keys(p, first_row, first_row + rows - 1);
    const int64_t from = split * plan.split_keys, to = from + plan.split_keys;
    begin = static_cast<int>(range.begin > from ? range.begin : from);
    end = static_cast<int>(range.end < to ? range.end : to);

    // Windows move with the query: the first ends earliest, the last begins latest.
    const int first = C::kThin ? 0 : first_row;
    const int last = (C::kThin ? static_cast<int>(p.queries) : first_row + rows) - 1;
    const int64_t first_end = visible_keys(p, first, first).end;
    whole_begin = static_cast<int>(visible_keys(p, last, last).begin);
    whole_end = static_cast<int>(first_end < end ? first_end : end);
    constexpr int64_t kFar = int64_t{1} << 62;
    seen_begin = p.window_left >= 0 ? p.query_offset - p.window_left : -kFar;
    seen_end = p.window_right >= 0 ? p.query_offset + p.window_right + 1 : kFar;
  }

  // Rows beyond the last are taken for the last, so that whatever is read for them exists.
  __device__ __forceinline__ RowOf row(const Plan& plan, int row_of_tile) const {
    const int r = first_row + min(row_of_tile, rows - 1);
    if (!C::kThin) return {first_head, r};
    const int queries = static_cast<int>(plan.params.queries);
    return {first_head + r / queries, r % queries};
  }
};

// Keys or values of the block's head, from row `first` on.
template <class Storage, class C>
__device__ __forceinline__ const Storage* rows_of_head(const View& view, const Work<C>& work, int first) {
  return static_cast<const Storage*>(view.data) + view.offset(work.batch, work.kv_head, first);
}

// One coefficient of a head, such as a slope or a sink.
__device__ __forceinline__ float head_scalar(const HeadScalars& scalars, int64_t batch, int64_t head) {
  return static_cast<const float*>(scalars.data)[batch * scalars.batch_stride + head * scalars.head_stride];
}

}  // namespace selfattn::cuda::sm80
