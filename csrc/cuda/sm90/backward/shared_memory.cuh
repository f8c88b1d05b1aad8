// Shared memory of a block of the backward: what it owns, rings of what passes by, and what its warps tell
// each other.
#pragma once

#include "../../common/ptx_sm80.cuh"
#include "../../sm80/backward/work.cuh"
#include "../ring.cuh"
#include "config.cuh"

namespace selfattn::cuda::sm90::backward {

using sm80::backward::Passing;
using sm80::backward::Work;

// Barriers named "full" are waited for by those who compute, "empty" by the producer.
template <class C>
struct Control {
  uint64_t own_full;
  uint64_t first_full[C::kFirstStages], first_empty[C::kFirstStages];
  uint64_t second_full[C::kSecondStages], second_empty[C::kSecondStages];
  uint64_t done;                     // all tiles are computed with
  Passing passing[C::kFirstStages];  // head -1: there are no more
  int again;                         // not 0: the tiles come once more, to be computed with carefully

  __device__ __forceinline__ void init() {
    constexpr int kWarps = C::kThreads / kWarp;
    ptx::barrier_init(&own_full, 1);
    for (int n = 0; n < C::kFirstStages; ++n) {
      ptx::barrier_init(&first_full[n], 1);
      ptx::barrier_init(&first_empty[n], kWarps);
    }
    for (int n = 0; n < C::kSecondStages; ++n) {
      ptx::barrier_init(&second_full[n], 1);
      ptx::barrier_init(&second_empty[n], kWarps);
    }
    ptx::barrier_init(&done, kWarps);
    again = 0;
    ptx::barrier_init_fence();
  }
};

template <class C>
struct SharedLayout {
  static constexpr int kRowBytes = 128;  // of a panel
  static constexpr int kOwnFirstBytes = C::kRows * kRowBytes * C::kFirstPanels;
  static constexpr int kOwnSecondBytes = C::kNeedsSecondDots ? C::kRows * kRowBytes * C::kSecondPanels : 0;
  static constexpr int kFirstBytes = C::kTileColumns * kRowBytes * C::kFirstPanels;
  static constexpr int kSecondBytes = C::kTileColumns * kRowBytes * C::kSecondPanels;

  static constexpr int kOwnFirst = 0;
  static constexpr int kOwnSecond = kOwnFirst + kOwnFirstBytes;
  static constexpr int kFirst = kOwnSecond + kOwnSecondBytes;
  static constexpr int kSecond = kFirst + C::kFirstStages * kFirstBytes;
  static constexpr int kNumbers = kSecond + C::kSecondStages * kSecondBytes;
  static_assert(C::kRows * C::kExchangeColumns * 4 <= kNumbers,
                "results on their way out take the tiles' place");

  // Of the queries of a tile: three numbers each, and of each stage where queries pass by.
  static constexpr int kNumberBytes = 3 * C::kTileQueries * 4;
  static constexpr int kFlags = kNumbers + (C::kOwnsQueries ? 1 : C::kFirstStages) * kNumberBytes;
  static constexpr int kControl = kFlags + 2 * C::kTileColumns;
  static constexpr int kWork = (kControl + static_cast<int>(sizeof(Control<C>)) + 15) / 16 * 16;
  static constexpr int kEnd = kWork + static_cast<int>(sizeof(Work<C>));

  static constexpr int kAlignment = 1024;  // of tiles, for the swizzle; blocks are given 128
  static constexpr int kBytes = kEnd + kAlignment - 128;
  static_assert(kBytes <= 227 * 1024, "a block of compute capability 9.0 has no more");
};

// What sm80's functions ask of shared memory while columns pass by.
template <class C>
struct TileNumbers {
  float* numbers;
  unsigned char* flags;

  __device__ __forceinline__ float* shift() const { return numbers; }
  __device__ __forceinline__ float* inverse_sum() const { return numbers + C::kTileQueries; }
  __device__ __forceinline__ float* delta() const { return numbers + 2 * C::kTileQueries; }
  // Whether elements of a column's query or key were left out.
  __device__ __forceinline__ unsigned char* passing_first_flags() const { return flags; }
  __device__ __forceinline__ unsigned char* passing_second_flags() const { return flags + C::kTileColumns; }

  // Those of a part of the columns.
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

  __device__ __forceinline__ unsigned char* own_first() const { return bytes + Layout::kOwnFirst; }
  __device__ __forceinline__ unsigned char* own_second() const { return bytes + Layout::kOwnSecond; }
  __device__ __forceinline__ unsigned char* first(int stage) const {
    return bytes + Layout::kFirst + stage * Layout::kFirstBytes;
  }
  __device__ __forceinline__ unsigned char* second(int stage) const {
    return bytes + Layout::kSecond + stage * Layout::kSecondBytes;
  }
  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(bytes); }
  __device__ __forceinline__ TileNumbers<C> numbers(int first_stage) const {
    const int stage = C::kOwnsQueries ? 0 : first_stage;
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
