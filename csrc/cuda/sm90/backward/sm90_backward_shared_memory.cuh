// Shared memory of a block of the backward: own tiles, rings of passing ones, barriers.
#pragma once

#include "../../common/ptx_sm80.cuh"
#include "../../mma/backward/backward_work.cuh"
#include "../ring.cuh"
#include "sm90_backward_config.cuh"

namespace selfattn::cuda::sm90::backward {

using mma::backward::Passing;
using mma::backward::Work;

// Warps that compute wait for barriers named "full", the producer for those named "empty".
template <class C>
struct Control {
  uint64_t own_full;
  uint64_t qk_full[C::kQKStages], qk_empty[C::kQKStages];
  uint64_t vo_full[C::kVOStages], vo_empty[C::kVOStages];
  uint64_t done;                  // the warps are done with all tiles
  Passing passing[C::kQKStages];  // its head is -1 if there are no more
  int again;                      // not 0 if the tiles must come once more, to be computed with carefully

  __device__ __forceinline__ void init() {
    constexpr int kWarps = C::kThreads / kWarp;
    ptx::barrier_init(&own_full, 1);
    for (int n = 0; n < C::kQKStages; ++n) {
      ptx::barrier_init(&qk_full[n], 1);
      ptx::barrier_init(&qk_empty[n], kWarps);
    }
    for (int n = 0; n < C::kVOStages; ++n) {
      ptx::barrier_init(&vo_full[n], 1);
      ptx::barrier_init(&vo_empty[n], kWarps);
    }
    ptx::barrier_init(&done, kWarps);
    again = 0;
    ptx::barrier_init_fence();
  }
};

template <class C>
struct SharedLayout {
  static constexpr int kRowBytes = 128;  // bytes of a panel's row
  static constexpr int kOwnQKBytes = C::kRows * kRowBytes * C::kQKPanels;
  static constexpr int kOwnVOBytes = C::kNeedsDP ? C::kRows * kRowBytes * C::kVOPanels : 0;
  static constexpr int kQKBytes = C::kTileColumns * kRowBytes * C::kQKPanels;
  static constexpr int kVOBytes = C::kTileColumns * kRowBytes * C::kVOPanels;

  static constexpr int kOwnQK = 0;
  static constexpr int kOwnVO = kOwnQK + kOwnQKBytes;
  static constexpr int kQK = kOwnVO + kOwnVOBytes;
  static constexpr int kVO = kQK + C::kQKStages * kQKBytes;
  static constexpr int kNumbers = kVO + C::kVOStages * kVOBytes;
  static_assert(C::kRows * C::kExchangeColumns * 4 <= kNumbers,
                "results on their way out take the tiles' place");

  // Three numbers for each query of a tile; if queries pass by, for the tiles of all stages.
  static constexpr int kNumberBytes = 3 * C::kTileQueries * 4;
  static constexpr int kFlags = kNumbers + (C::kOwnsQueries ? 1 : C::kQKStages) * kNumberBytes;
  static constexpr int kControl = kFlags + 2 * C::kTileColumns;
  static constexpr int kWork = (kControl + static_cast<int>(sizeof(Control<C>)) + 15) / 16 * 16;
  static constexpr int kEnd = kWork + static_cast<int>(sizeof(Work<C>));

  static constexpr int kAlignment = 1024;  // what the swizzle of tiles needs; blocks are given 128
  static constexpr int kBytes = kEnd + kAlignment - 128;
  static_assert(kBytes <= 227 * 1024, "a block of compute capability 9.0 has no more");
};

// The part of shared memory that mma/'s functions use while columns pass by.
template <class C>
struct TileNumbers {
  float* numbers;
  unsigned char* flags;

  __device__ __forceinline__ float* shift() const { return numbers; }
  __device__ __forceinline__ float* inverse_sum() const { return numbers + C::kTileQueries; }
  __device__ __forceinline__ float* delta() const { return numbers + 2 * C::kTileQueries; }
  // Whether elements of a column's query or key were left out.
  __device__ __forceinline__ unsigned char* passing_qk_flags() const { return flags; }
  __device__ __forceinline__ unsigned char* passing_vo_flags() const { return flags + C::kTileColumns; }

  // The numbers and flags of the columns from `first_column` on.
  __device__ __forceinline__ TileNumbers part(int first_column) const {
    return {C::kOwnsQueries ? numbers : numbers + first_column, flags + first_column};
  }
};

template <class C>
struct SharedMemory {
  using Layout = SharedLayout<C>;
  unsigned char* bytes;

  __device__ __forceinline__ explicit SharedMemory(unsigned char* memory)
      : bytes(memory + (Layout::kAlignment - reinterpret_cast<uintptr_t>(memory) % Layout::kAlignment) %
                           Layout::kAlignment) {}

  __device__ __forceinline__ unsigned char* own_qk() const { return bytes + Layout::kOwnQK; }
  __device__ __forceinline__ unsigned char* own_vo() const { return bytes + Layout::kOwnVO; }
  __device__ __forceinline__ unsigned char* qk(int stage) const {
    return bytes + Layout::kQK + stage * Layout::kQKBytes;
  }
  __device__ __forceinline__ unsigned char* vo(int stage) const {
    return bytes + Layout::kVO + stage * Layout::kVOBytes;
  }
  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(bytes); }
  __device__ __forceinline__ TileNumbers<C> numbers(int qk_stage) const {
    const int stage = C::kOwnsQueries ? 0 : qk_stage;
    return {reinterpret_cast<float*>(bytes + Layout::kNumbers + stage * Layout::kNumberBytes),
            bytes + Layout::kFlags};
  }
  // See the forward's control_again().
  __device__ __forceinline__ Control<C>& control() const {
    return *reinterpret_cast<Control<C>*>(bytes + ptx::opaque(Layout::kControl));
  }
  __device__ __forceinline__ Work<C>& work() const {
    return *reinterpret_cast<Work<C>*>(bytes + Layout::kWork);
  }
};

}  // namespace selfattn::cuda::sm90::backward
