// Whether a mask shows any key of a tile to any query of a tile.
//
// Pairs of tiles of which it shows nothing are never loaded.
#pragma once

#include "../mma/visibility.cuh"

namespace selfattn::cuda::sm90 {

// Whether 16 bytes of a mask hide everything: they repeat one word, or in float64 two words, one of them 0.
__device__ __forceinline__ bool hides_all(uint4 words, DType dtype) {
  const uint32_t word = dtype == DType::kBool       ? 0u
                        : dtype == DType::kBFloat16 ? 0xff80ff80u
                        : dtype == DType::kFloat16  ? 0xfc00fc00u
                        : dtype == DType::kFloat32  ? 0xff800000u
                                                    : 0xfff00000u;
  const uint32_t low = dtype == DType::kFloat64 ? 0u : word;
  return words.x == low && words.y == word && words.z == low && words.w == word;
}

// Looks at `rows` queries, of which row_at(n) is the n-th, or the last for n beyond it, and `keys` keys from
// `first_key` on. Rows are read 16 bytes at a time if possible. Collective of a warp.
template <class RowAt>
__device__ __forceinline__ bool mask_shows_any(const View& mask, int batch, int rows, int first_key, int keys,
                                               const RowAt& row_at) {
  constexpr int kRowsAtOnce = 2;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int size = static_cast<int>(size_of(mask.dtype)), per_chunk = 16 / size;
  const int64_t step = mask.stride[3];
#pragma unroll 1
  for (int first = 0; first < rows; first += kRowsAtOnce) {
    bool shown = false;
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const mma::RowOf row = row_at(first + r);
      const int64_t at = mask.offset(batch, row.head, row.query) + first_key * step;
      const char* const bytes = static_cast<const char*>(mask.data) + at * size;
      const bool vectors = step == 1 && reinterpret_cast<uintptr_t>(bytes) % 16 == 0;
      const int chunks = vectors ? keys / per_chunk : 0;
#pragma unroll 1
      for (int n = lane; n < chunks; n += kWarp) {
        shown |= !hides_all(reinterpret_cast<const uint4*>(bytes)[n], mask.dtype);
      }
#pragma unroll 1
      for (int key = chunks * per_chunk + lane; key < keys; key += kWarp) {
        shown |= !mma::mask_hides(mask, at + key * step);
      }
    }
    if (__any_sync(kWholeWarp, shown)) return true;
    const bool one_head = mask.stride[1] == 0 || row_at(0).head == row_at(rows - 1).head;
    if (mask.stride[2] == 0 && one_head) return false;  // all rows are alike
  }
  return false;
}

}  // namespace selfattn::cuda::sm90
