// Launches with one block per item of work, however many items there are.
//
// A grid's first dimension has at most 2^31 - 1 blocks, and the others have at most 65,535.
#pragma once

#include <algorithm>

#include "../../core/integers.h"
#include "device.cuh"
#include "launch.h"

namespace selfattn::cuda {

constexpr int64_t kLargestGrid = 2147483647;

// Calls start(grid, first) for blocks first + blockIdx.x = 0 .. blocks - 1.
template <class Start>
void for_each_grid(int64_t blocks, const Start& start) {
  for (int64_t first = 0; first < blocks; first += kLargestGrid) {
    start(dim3(static_cast<unsigned>(std::min(blocks - first, kLargestGrid))), first);
  }
}

// Launches kernel(arguments..., first) for each of these grids.
template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                   const Launch& where, const Arguments&... arguments) {
  for_each_grid(blocks, [&](dim3 grid, int64_t first) {
    launch(kernel, grid, dim3(static_cast<unsigned>(threads)), shared_bytes, where.stream, arguments...,
           first);
  });
}

// A grid of at least so many blocks, in x alone if they fit there. The last row of the grid may have more, so
// kernels must be told how many there are.
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t kMostX = int64_t{1} << 30;
  const int64_t y = divide_up(blocks, kMostX);
  return dim3(static_cast<unsigned>(y > 1 ? kMostX : blocks), static_cast<unsigned>(y));
}

// The number of a block of such a grid.
__device__ __forceinline__ int64_t block_of_grid() {
  return blockIdx.x + static_cast<int64_t>(blockIdx.y) * gridDim.x;
}

// The head and the rows that a block works on. Tiles with the last rows come first, because they have the
// most work under a causal mask.
struct HeadTile {
  int64_t batch, head, first_row;

  // `index` counts tiles of `height` rows, first all tiles of one head, then those of the next.
  __device__ __forceinline__ HeadTile(int64_t index, int64_t heads, int64_t rows, int height) {
    const int64_t tiles = divide_up(rows, height);
    const int64_t head_index = index / tiles;
    first_row = (tiles - 1 - index % tiles) * height;
    batch = head_index / heads;
    head = head_index % heads;
  }
};

}  // namespace selfattn::cuda
