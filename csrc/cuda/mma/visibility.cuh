// Which queries of a tile see which of its keys, by position and by the mask.
#pragma once

#include "../common/elementary.cuh"
#include "../function/function_tile.cuh"
#include "place.cuh"

namespace selfattn::cuda::mma {

// Columns of the tile that a row sees by its position.
struct Columns {
  int begin, end;
  __device__ __forceinline__ bool hold(int column) const { return column >= begin && column < end; }
};

template <class C>
__device__ __forceinline__ Columns visible_columns(const Work<C>& work, int query, int first_key) {
  const int64_t end = min(query + work.seen_end, int64_t{work.end});
  return {static_cast<int>(clamp_key(query + work.seen_begin - first_key, C::kKeys)),
          static_cast<int>(clamp_key(end - first_key, C::kKeys))};
}

// Whether every row of the block sees every key of the tile by its position.
template <class C>
__device__ __forceinline__ bool sees_whole_tile(const Work<C>& work, int first_key) {
  return first_key >= work.whole_begin && first_key + C::kKeys <= work.whole_end;
}

// Whether a mask element hides: false, or -inf.
__device__ __forceinline__ bool mask_hides(const View& mask, int64_t element) {
  switch (mask.dtype) {
    case DType::kBool:
      return static_cast<const uint8_t*>(mask.data)[element] == 0;
    case DType::kBFloat16:
      return static_cast<const uint16_t*>(mask.data)[element] == 0xff80u;
    case DType::kFloat16:
      return static_cast<const uint16_t*>(mask.data)[element] == 0xfc00u;
    case DType::kFloat32:
      return static_cast<const float*>(mask.data)[element] == -infinity<float>();
    case DType::kFloat64:
      return static_cast<const double*>(mask.data)[element] == -infinity<double>();
  }
  return false;
}

// Whether the call's function hides a key from a query.
__device__ __forceinline__ bool function_hides(const ScoreFunction& function, int batch, RowOf row, int key) {
  FunctionTile<float> tile(function, batch, row.head, row.query);
  tile.move_to(key);  // so that the map is asked for this score
  return tile.hides(0, 0);
}

// How the function's map sees a tile of the forward.
template <class C>
__device__ __forceinline__ SeenTile seen_tile(const Work<C>& work, const ScoreFunction& function,
                                              int first_key) {
  const int keys = min(work.keys - first_key, C::kKeys);
  const RowOf first = work.row(0), last = work.row(work.rows - 1);
  if (first.head == last.head) {
    return cuda::seen_tile(function, work.batch, first.head, first.query, last.query - first.query + 1,
                           first_key, keys);
  }
  SeenTile all = cuda::seen_tile(function, work.batch, first.head, 0, work.queries, first_key, keys);
  for (int head = first.head + 1; head <= last.head && all.alike; ++head) {
    const SeenTile seen = cuda::seen_tile(function, work.batch, head, 0, work.queries, first_key, keys);
    all.alike = seen.alike && seen.by == all.by;
  }
  return all;
}

// Whether a query sees a key by every rule.
template <bool kHasMask, class Work>
__device__ __forceinline__ bool sees(const AttentionParams& p, const Work& work, RowOf row, int key) {
  return key >= row.query + work.seen_begin && key < row.query + work.seen_end && key < work.keys &&
         (!kHasMask || p.mask.data == nullptr ||
          !mask_hides(p.mask, p.mask.offset(work.batch, row.head, row.query) + key * p.mask.stride[3])) &&
         (!FunctionTile<float>::kAny || !function_hides(p.function, work.batch, row, key));
}

// The mask's bits for the rows that a lane owns, in a warp whose rows are queries and whose columns are keys.
// Column c of the warp is bit c % 32 of word c / 32, set where the mask shows it.
template <int kStrips, int kColumns>
struct MaskBits {
  static constexpr int kWords = (kColumns + 31) / 32;
  uint32_t of[kStrips][2][kWords];

  // Reads the mask of a tile row by row, with the keys across the lanes, as they lie in memory. Returns
  // whether the mask shows anything to the rows of the warp.
  template <class Place>
  __device__ __forceinline__ bool load(const Place& at) {
    const View& mask = at.params().mask;
    const int lane = at.lane.lane, group = at.lane.group;
    const int key = at.first_key_of_warp() + lane;
    uint32_t any = 0;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll 2
      for (int r = 0; r < 16; ++r) {
        const int row_of_tile = at.lane.first_row + strip * 16 + r;
        const RowOf row = at.row(row_of_tile);
        const int64_t element = mask.offset(at.batch(), row.head, row.query) + key * mask.stride[3];
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const bool exists =
              row_of_tile < at.work.rows && lane + word * 32 < kColumns && key + word * 32 < at.keys();
          const bool shown = exists && !mask_hides(mask, element + word * 32 * mask.stride[3]);
          const uint32_t bits = __ballot_sync(kWholeWarp, shown);
          any |= bits;
          if (r == group) of[strip][0][word] = bits;
          if (r == group + 8) of[strip][1][word] = bits;
        }
      }
    }
    return any != 0;
  }

  // Words are chosen by compile-time numbers, since they are registers.
  __device__ __forceinline__ bool shows(int quad, int strip, int half, int tile, int i) const {
    return of[strip][half][tile / 4] >> (tile % 4 * 8 + quad * 2 + i) & 1u;
  }
};

template <class C>
using MaskBitsOf = MaskBits<C::kStrips, C::kWarpColumns>;

}  // namespace selfattn::cuda::mma
