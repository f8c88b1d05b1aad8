// Shared memory of a block of the forward: tiles, results and barriers.
#pragma once

#include "../common/ptx_sm80.cuh"
#include "../mma/work.cuh"
#include "ring.cuh"

namespace selfattn::cuda::sm90 {

using mma::Work;

// The items of work that are known at a time: while one is computed, the next is loaded.
constexpr int kItems = 2;

// Warps that compute wait for barriers named "full", the producer for those named "empty".
template <class C>
struct Control {
  uint64_t query_full, query_empty;
  uint64_t key_full[C::kStages], key_empty[C::kStages];
  uint64_t value_full[C::kStages], value_empty[C::kStages];
  uint64_t value_landed;    // values have arrived that the producer changes before others see them
  uint64_t done[kItems];    // the item is computed
  int64_t number[kItems];   // the item's number
  int tile_of[C::kStages];  // the tile of keys in a stage; -1 if the item has no more
  int again[kItems];        // not 0 if the item must be computed once more, carefully

  __device__ __forceinline__ void init() {
    constexpr int kWarps = C::kThreads / kWarp;
    ptx::barrier_init(&query_full, 1);
    ptx::barrier_init(&query_empty, kWarps);
    ptx::barrier_init(&value_landed, 1);
    for (int n = 0; n < C::kStages; ++n) {
      ptx::barrier_init(&key_full[n], 1);
      ptx::barrier_init(&key_empty[n], kWarps);
      ptx::barrier_init(&value_full[n], 1);
      ptx::barrier_init(&value_empty[n], kWarps);
    }
    for (int n = 0; n < kItems; ++n) {
      ptx::barrier_init(&done[n], kWarps);
      again[n] = 0;
    }
    ptx::barrier_init_fence();
  }
};

template <class C>
struct SharedLayout {
  static constexpr int kRowBytes = 128;  // bytes of a panel's row
  static constexpr int kQueryBytes = C::kRows * kRowBytes * C::kPanels;
  static constexpr int kKeyBytes = C::kKeys * kRowBytes * C::kPanels;
  static constexpr int kValueBytes = C::kKeys * kRowBytes * C::kValuePanels;

  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + kQueryBytes;
  static constexpr int kValues = kKeys + C::kStages * kKeyBytes;
  static constexpr int kExchange = kValues + C::kStages * kValueBytes;
  static constexpr int kControl = kExchange + C::kRows * C::kExchangeColumns * 4;
  static constexpr int kWork = (kControl + static_cast<int>(sizeof(Control<C>)) + 15) / 16 * 16;
  static constexpr int kEnd = kWork + kItems * static_cast<int>(sizeof(Work<C>));

  static constexpr int kAlignment = 1024;  // what the swizzle of tiles needs; blocks are given 128
  static constexpr int kBytes = kEnd + kAlignment - 128;
  static_assert(kBytes <= 227 * 1024, "a block of compute capability 9.0 has no more");
};

template <class C>
struct SharedMemory {
  using Layout = SharedLayout<C>;
  unsigned char* bytes;

  __device__ __forceinline__ explicit SharedMemory(unsigned char* memory)
      : bytes(memory + (Layout::kAlignment - reinterpret_cast<uintptr_t>(memory) % Layout::kAlignment) %
                           Layout::kAlignment) {}

  __device__ __forceinline__ unsigned char* queries() const { return bytes + Layout::kQueries; }
  __device__ __forceinline__ unsigned char* keys(int stage) const {
    return bytes + Layout::kKeys + stage * Layout::kKeyBytes;
  }
  __device__ __forceinline__ unsigned char* values(int stage) const {
    return bytes + Layout::kValues + stage * Layout::kValueBytes;
  }
  __device__ __forceinline__ float* exchange() const {
    return reinterpret_cast<float*>(bytes + Layout::kExchange);
  }
  __device__ __forceinline__ Control<C>& control() const {
    return *reinterpret_cast<Control<C>*>(bytes + Layout::kControl);
  }
  // The same with an address that is made anew wherever it is used: otherwise the compiler would keep that of
  // each barrier in a register.
  __device__ __forceinline__ Control<C>& control_again() const {
    return *reinterpret_cast<Control<C>*>(bytes + ptx::opaque(Layout::kControl));
  }
  __device__ __forceinline__ Work<C>& work(int item) const {
    return reinterpret_cast<Work<C>*>(bytes + Layout::kWork)[item % kItems];
  }
};

}  // namespace selfattn::cuda::sm90
