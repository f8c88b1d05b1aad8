// The kernel that copies new keys and values into a cache.
#include "../../core/sequences.h"
#include "../common/grid.cuh"
#include "append_to_cache_cuda.h"

namespace selfattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRowsOfBlock = kThreads / kWarp;

// A new row: its sequence, its index among the sequence's new rows, and their number.
struct NewRow {
  int64_t batch, index, count;
};

// A packed row belongs to the last sequence that does not start behind it. Starts that decrease give some
// sequence, and one of its rows or an index it does not have.
__device__ __forceinline__ NewRow new_row(const AppendParams& a, int64_t row) {
  if (a.row_starts == nullptr) return {row / a.rows, row % a.rows, a.rows};
  int64_t batch = 0;
  for (int64_t end = a.batch; end - batch > 1;) {
    const int64_t middle = batch + (end - batch) / 2;
    (a.row_starts[middle] <= row ? batch : end) = middle;
  }
  const auto sequence = packed_rows(a.row_starts, batch, a.rows, a.rows);
  return {batch, row - sequence.first, sequence.count};
}

template <class Unit>
__device__ __forceinline__ void copy(const void* from, void* to, int64_t bytes, int lane) {
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t n = lane; n < units; n += kWarp) {
    static_cast<Unit*>(to)[n] = static_cast<const Unit*>(from)[n];
  }
}

// A warp copies a row of elements. Each lane copies 16 or 4 bytes at a time if both addresses and the size
// allow it, otherwise 2, which every dtype allows.
__device__ __forceinline__ void copy_row(const void* from, void* to, int64_t bytes, int lane) {
  const uint64_t ends =
      reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(bytes);
  if (ends % sizeof(uint4) == 0) {
    copy<uint4>(from, to, bytes, lane);
  } else if (ends % sizeof(uint32_t) == 0) {
    copy<uint32_t>(from, to, bytes, lane);
  } else {
    copy<uint16_t>(from, to, bytes, lane);
  }
}

// A warp copies a row of keys and one of values, of one head.
__global__ void __launch_bounds__(kThreads, 8)
    append_to_cache_kernel(const AppendParams a, const int64_t warps, const int64_t first_block) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t warp = (first_block + blockIdx.x) * kRowsOfBlock + thread / kWarp;
  if (warp >= warps) return;
  const int64_t row = warp / a.kv_heads, head = warp % a.kv_heads;
  const NewRow of = new_row(a, row);
  if (of.index < 0 || of.index >= of.count) return;

  // The length is limited, far beyond any cache, so that sums are exact.
  constexpr int64_t kFar = int64_t{1} << 48;
  const int64_t length = limited(a.lengths[of.batch], -kFar, kFar);
  const int64_t position = length - (a.lengths_after ? of.count : 0) + of.index;
  if (position < 0 || position >= a.capacity) return;
  int64_t place = of.batch, place_row = position;
  if (a.pages.table != nullptr) {
    place = a.pages.table[of.batch * a.pages.stride + position / a.pages.size];
    place_row = position % a.pages.size;
    if (place < 0 || place >= a.pages.count) return;
  }

  const bool packed = a.row_starts != nullptr;
  const int64_t from_batch = packed ? 0 : of.batch, from_row = packed ? row : of.index;
  const int64_t size = size_of(a.dtype);
  const int lane = thread % kWarp;
  copy_row(moved(a.key.data, a.key.offset(from_batch, head, from_row), a.dtype),
           moved(a.key_cache.data, a.key_cache.offset(place, head, place_row), a.dtype), a.head_dim * size,
           lane);
  copy_row(moved(a.value.data, a.value.offset(from_batch, head, from_row), a.dtype),
           moved(a.value_cache.data, a.value_cache.offset(place, head, place_row), a.dtype),
           a.value_dim * size, lane);
}

}  // namespace

void append_to_cache(const AppendParams& a, const Launch& where) {
  const int64_t warps = (a.row_starts != nullptr ? a.rows : a.batch * a.rows) * a.kv_heads;
  launch_blocks(&append_to_cache_kernel, divide_up(warps, kRowsOfBlock), kThreads, 0, where, a, warps);
}

}  // namespace selfattn::cuda
