// The part of a tile that a warp keeps in registers, laid out as mma leaves it in the lanes.
//
// The Config of a kernel says how many strips of 16 rows a warp owns and into how many tiles of eight columns
// or dims its accumulators are cut. at[strip][tile][2 * half + i] is the element of row Lane::row(strip,
// half) and column Lane::column(tile) + i or dim Lane::dim(tile) + i.
#pragma once

#include "../common/elementary.cuh"
#include "../common/ptx_sm80.cuh"

namespace selfattn::cuda::mma {

template <class C>
struct Scores {
  float at[C::kStrips][C::kColumnTiles][4];
};
template <class C>
struct Output {
  float at[C::kStrips][C::kDimTiles][4];
};

// A number that follows from the thread's. Where registers are scarcer than additions, the compiler must work
// it out anew wherever it is used.
template <class C>
__device__ __forceinline__ int of_thread(int number) {
  return C::kKeepsAddresses ? number : ptx::opaque(number);
}
template <class C>
__device__ __forceinline__ int this_thread() {
  return of_thread<C>(static_cast<int>(threadIdx.x));
}

// The place of a thread in its warp, and of the warp in the tile.
template <class C>
struct Lane {
  int thread, lane, group, quad;
  int first_row, first_column;  // the warp's first ones in the tile

  __device__ __forceinline__ Lane()
      : thread(this_thread<C>()), lane(thread & 31), group(lane >> 2), quad(lane & 3) {
    const unsigned warp = static_cast<unsigned>(thread) / kWarp;
    const unsigned row_warp = C::kColumnWarps == 1 ? warp : warp % C::kRowWarps;
    const unsigned column_warp = C::kColumnWarps == 1 ? 0 : warp / C::kRowWarps;
    first_row = static_cast<int>(row_warp * C::kWarpRows);
    first_column = static_cast<int>(column_warp * C::kWarpColumns);
  }
  __device__ __forceinline__ int row(int strip, int half) const {
    return first_row + strip * 16 + half * 8 + group;
  }
  // The first of the lane's two columns; the second is the next.
  __device__ __forceinline__ int column(int tile) const { return first_column + tile * 8 + quad * 2; }
  __device__ __forceinline__ int dim(int tile) const { return tile * 8 + quad * 2; }
};

// Calls body(strip, half, tile, i, element) for every element of a lane; i counts its two columns.
template <int kStrips, int kTiles, class Body>
__device__ __forceinline__ void for_each_element(float (&elements)[kStrips][kTiles][4], const Body& body) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) body(strip, half, tile, i, elements[strip][tile][2 * half + i]);
      }
    }
  }
}

template <int kStrips, int kTiles>
__device__ __forceinline__ void clear(float (&elements)[kStrips][kTiles][4]) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) elements[strip][tile][i] = 0.0f;
    }
  }
}

// Scales the lane's elements of one row.
template <int kStrips, int kTiles>
__device__ __forceinline__ void scale_row(float (&elements)[kStrips][kTiles][4], int strip, int half,
                                          float by) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    elements[strip][tile][2 * half] *= by;
    elements[strip][tile][2 * half + 1] *= by;
  }
}

template <int kStrips, int kTiles>
__device__ __forceinline__ bool is_finite(const float (&elements)[kStrips][kTiles][4]) {
  bool finite = true;
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) finite = finite && fabsf(elements[strip][tile][i]) < infinity<float>();
    }
  }
  return finite;
}

// These reduce over the four lanes that share a row. Collective.
__device__ __forceinline__ float max_of_row(float x) {
  x = larger(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return larger(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}

// Element `column` of the warp's columns, in the lane's row of that strip and half. It comes from the one of
// the four lanes that has it. Registers have no index at run time, hence the selection. Collective.
template <int kStrips, int kTiles>
__device__ __forceinline__ float element_of_row(const float (&elements)[kStrips][kTiles][4], int lane,
                                                int strip, int half, int column) {
  float element = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float* pair = &elements[strip][tile][2 * half];
    if (column / 8 == tile) element = column % 2 ? pair[1] : pair[0];
  }
  return __shfl_sync(kWholeWarp, element, (lane & ~3) | (column % 8 / 2));
}

}  // namespace selfattn::cuda::mma
