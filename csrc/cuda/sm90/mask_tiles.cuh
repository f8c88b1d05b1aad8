// Whether a mask shows any key of a tile to any query of a tile.
//
// Pairs of tiles of which it shows nothing are never loaded.
#pragma once

#include "../mma/visibility.cuh"

namespace selfattn::cuda::sm90 {

// Whether 16 bytes of a mask, which is not of float64, hide everything: they repeat one word.
__device__ __forceinline__ bool hides_all(uint4 words, DType dtype) {
  const uint32_t word = dtype == DType::kBool       ? 0u
                        : dtype == DType::kBFloat16 ? 0xff80ff80u
                        : dtype == DType::kFloat16  ? 0xfc00fc00u
                                                    : 0xff800000u;
  return words.x == word && words.y == word && words.z == word && words.w == word;
}

// Reads rows 16 bytes at a time: as many rows as the warp has lanes for, and four times that before it looks.
// The rows of one look lie far apart, because what a mask shows is often a block.
template <class RowAt>
__device__ __forceinline__ bool chunks_show_any(const View& mask, int batch, int rows, int first_key,
                                                int chunks, const RowAt& row_at) {
  constexpr int kLooks = 4, kApart = 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int rows_at_once = kWarp / chunks, row_of_lane = lane / chunks;
  const int64_t size = size_of(mask.dtype);
  const int64_t of_lane = first_key * size + lane % chunks * 16;
  const int distance = (rows + kApart - 1) / kApart;
#pragma unroll 1
  for (int first = 0; first < distance * kApart; first += kLooks * rows_at_once) {
    bool shown = false;
#pragma unroll
    for (int look = 0; look < kLooks; ++look) {
      const int n = first + look * rows_at_once + row_of_lane;
      const mma::RowOf row = row_at(min(n % kApart * distance + n / kApart, rows - 1));
      const char* const of_row =
          static_cast<const char*>(mask.data) + mask.offset(batch, row.head, row.query) * size;
      shown |= !hides_all(*reinterpret_cast<const uint4*>(of_row + of_lane), mask.dtype);
    }
    if (__any_sync(kWholeWarp, shown)) return true;
  }
  return false;
}

// Looks at `rows` queries, of which row_at(n) is the n-th, and `keys` keys from `first_key` on. `in_chunks`:
// see readable_by_chunks(). Collective of a warp.
template <class RowAt>
__device__ __forceinline__ bool mask_shows_any(const View& mask, bool in_chunks, int batch, int rows,
                                               int first_key, int keys, const RowAt& row_at) {
  const bool one_head = mask.stride[1] == 0 || row_at(0).head == row_at(rows - 1).head;
  if (mask.stride[2] == 0 && one_head) rows = 1;  // they are all alike
  const int bytes = keys * static_cast<int>(size_of(mask.dtype)), chunks = bytes / 16;
  if (in_chunks && chunks * 16 == bytes && chunks >= 1 && chunks <= kWarp && (chunks & (chunks - 1)) == 0) {
    return chunks_show_any(mask, batch, rows, first_key, chunks, row_at);
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    const mma::RowOf row = row_at(r);
    const int64_t at = mask.offset(batch, row.head, row.query) + first_key * mask.stride[3];
    bool shown = false;
#pragma unroll 1
    for (int key = lane; key < keys; key += kWarp) {
      shown |= !mma::mask_hides(mask, at + key * mask.stride[3]);
    }
    if (__any_sync(kWholeWarp, shown)) return true;
  }
  return false;
}

}  // namespace selfattn::cuda::sm90
