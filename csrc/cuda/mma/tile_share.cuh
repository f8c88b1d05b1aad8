// How the threads of a block divide a tile that they load or search.
#pragma once

#include "../../core/integers.h"
#include "fragments.cuh"

namespace selfattn::cuda::mma {

// Eight neighbouring lanes (four where rows have 12 or 4 chunks) share a row, so that a warp reads whole
// lines and a row's flag has one group of writers.
template <class C, int kRowCount, int kChunks>
struct TileShare {
  static constexpr int kLanes = kChunks % 8 == 0 ? 8 : 4;  // lanes that share a row
  static constexpr int kStep = C::kThreads / kLanes;       // rows that the block takes at a time
  static constexpr int kPasses = static_cast<int>(divide_up(kRowCount, kStep));
  static constexpr int kPerLane = kChunks / kLanes;
  // Whether neighbouring rows begin in the same bank: they then take their chunks in different order.
  static constexpr bool kAlternates = kChunks % 16 == 0;
  static_assert(kChunks % kLanes == 0 && kStep % 8 == 0, "the swizzle of a thread's chunks never changes");

  int row, lane;
  __device__ __forceinline__ TileShare() {
    const unsigned thread = static_cast<unsigned>(this_thread<C>());
    row = static_cast<int>(thread / kLanes);
    lane = static_cast<int>(thread % kLanes);
  }

  // The i-th chunk that a thread takes of float32. Chunks of even and of odd rows are in different halves of
  // 256 bytes, so that two rows, which are stored at a time, fill the banks with their pieces of half the
  // size.
  __device__ __forceinline__ int chunk(int i) const {
    const int odd = kAlternates ? row & 1 : 0;
    return lane + ((i & ~1) + ((i & 1) ^ odd)) * kLanes;
  }

  // Whether this pass goes beyond the tile. All but the last are known not to when compiling.
  static __device__ __forceinline__ bool beyond(int pass, int row_of_pass) {
    return kRowCount % kStep != 0 && pass == kPasses - 1 && row_of_pass >= kRowCount;
  }

  // Whether any lane of this thread's row says yes.
  __device__ __forceinline__ bool any_of_row(bool mine) const {
    const uint32_t votes = __ballot_sync(kWholeWarp, mine);
    const int first = static_cast<int>(threadIdx.x) & 31 & ~(kLanes - 1);
    return (votes >> first & ((1u << kLanes) - 1u)) != 0;
  }

  // Calls body(row) for the thread's rows of the tile, and flags a row if body returns true in any of its
  // lanes. Returns whether one of the thread's rows is flagged. Collective.
  template <class Body>
  __device__ __forceinline__ bool flag_rows(unsigned char* flags, const Body& body) const {
    bool any = false;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = row + pass * kStep;
      const bool exists = !beyond(pass, r);
      const bool flag = any_of_row(exists && body(r));
      if (lane == 0 && exists) flags[r] = flag;
      any |= flag;
    }
    return any;
  }
};

}  // namespace selfattn::cuda::mma
