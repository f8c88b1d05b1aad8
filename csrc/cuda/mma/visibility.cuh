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

// The mask's elements as bits of unsigned numbers, and the one that hides.
template <class T>
struct MaskWord {
  T hidden;

  // Which of the elements in four bytes show: a bit for each.
  __device__ __forceinline__ uint32_t shown(uint32_t word) const {
    if constexpr (sizeof(T) == 1) {
      word |= word >> 4;
      word |= word >> 2;
      word |= word >> 1;
      return (word & 0x01010101u) * 0x01020408u >> 24 & 15u;  // the product gathers the lowest bits of bytes
    } else if constexpr (sizeof(T) == 2) {
      return ((word & 0xffffu) != hidden ? 1u : 0u) | (word >> 16 != hidden ? 2u : 0u);
    } else {
      return word != hidden ? 1u : 0u;
    }
  }

  // Which of 16 neighbouring elements show. Their address is a multiple of 16.
  __device__ __forceinline__ uint32_t shown_of_16(const T* elements) const {
    constexpr int kBits = 4 / sizeof(T);
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 4 / kBits; ++n) {
      const uint4 chunk = reinterpret_cast<const uint4*>(elements)[n];
      bits |= (shown(chunk.x) | shown(chunk.y) << kBits | shown(chunk.z) << 2 * kBits |
               shown(chunk.w) << 3 * kBits)
              << 4 * kBits * n;
    }
    return bits;
  }
};

// Calls body with the MaskWord of a mask whose elements are read in chunks.
template <class Body>
__device__ __forceinline__ void with_mask_word(DType dtype, const Body& body) {
  if (dtype == DType::kBool) {
    body(MaskWord<uint8_t>{0});
  } else if (dtype == DType::kFloat32) {
    body(MaskWord<uint32_t>{0xff800000u});
  } else {
    body(MaskWord<uint16_t>{static_cast<uint16_t>(dtype == DType::kBFloat16 ? 0xff80u : 0xfc00u)});
  }
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

  // Reads the mask of a tile. Returns whether it shows anything to the rows of the warp.
  template <class Place>
  __device__ __forceinline__ bool load(const Place& at) {
    if (!at.plan.mask_chunks || at.first_key_of_warp() + kColumns > at.keys()) return load_elements(at);
    uint32_t any = 0;
    with_mask_word(at.params().mask.dtype, [&](const auto& word) { any = load_chunks(at, word); });
    return __any_sync(kWholeWarp, any != 0);
  }

  // Words are chosen by compile-time numbers, since they are registers.
  __device__ __forceinline__ bool shows(int quad, int strip, int half, int tile, int i) const {
    return of[strip][half][tile / 4] >> (tile % 4 * 8 + quad * 2 + i) & 1u;
  }

 private:
  // Reads 16 keys at a time: the four lanes that share a row share its chunks, too, and exchange their bits.
  template <class Place, class T>
  __device__ __forceinline__ uint32_t load_chunks(const Place& at, const MaskWord<T>& word_of) {
    constexpr int kChunks = kColumns / 16, kOwnChunks = (kChunks + 3) / 4;
    const View& mask = at.params().mask;
    uint32_t any = 0;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row_of_tile = at.lane.row(strip, half);
        const RowOf row = at.row(row_of_tile);
        const T* const of_row = static_cast<const T*>(mask.data) +
                                mask.offset(at.batch(), row.head, row.query) + at.first_key_of_warp();
        uint32_t own[kOwnChunks];
#pragma unroll
        for (int n = 0; n < kOwnChunks; ++n) {
          const int chunk = n * 4 + at.lane.quad;
          const bool exists = row_of_tile < at.work.rows && chunk < kChunks;
          own[n] = exists ? word_of.shown_of_16(of_row + chunk * 16) : 0u;
        }
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const int lane = word % 2 * 2;
          const uint32_t low = __shfl_sync(kWholeWarp, own[word / 2], lane, 4);
          const uint32_t high = __shfl_sync(kWholeWarp, own[word / 2], lane + 1, 4);
          of[strip][half][word] = low | high << 16;
          any |= of[strip][half][word];
        }
      }
    }
    return any;
  }

  // Reads row by row, with the keys across the lanes, as they lie in memory.
  template <class Place>
  __device__ __forceinline__ bool load_elements(const Place& at) {
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
};

template <class C>
using MaskBitsOf = MaskBits<C::kStrips, C::kWarpColumns>;

}  // namespace selfattn::cuda::mma
