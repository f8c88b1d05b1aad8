// Shared memory of a block of the forward, and the swizzle against bank conflicts.
#pragma once

#include "../mma/work.cuh"

namespace selfattn::cuda::sm80 {

using mma::Work;

constexpr int kMostSharedBytes = 99 * 1024;  // the most that a block of consumer devices has

// The layout of rows of kDim 16-bit elements in chunks of 16 bytes. ldmatrix reads the same chunk of eight
// rows at once, and these must lie in eight different groups of four banks: so chunks change places in their
// row by the row's number. Rows of 64 or 192 bytes already alternate between the halves of the banks.
template <int kDim>
struct Swizzle {
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kSpan = kDim % 64 == 0 ? 128 : 64;  // bytes within which chunks change places

  static __host__ __device__ constexpr int pattern(int row) {
    return kDim % 64 == 0 ? row & 7 : (row >> 1) & 3;
  }
  static __host__ __device__ constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ pattern(row)) << 4);
  }
};

// Places in bytes from the start of the block's shared memory. 16-bit types have a tile of queries, one of
// keys and one of values. float32 has planes of bfloat16 pieces of the queries, planes that keys and values
// take in turn, and a staging area for the next tile as it comes from memory.
template <class C>
struct SharedLayout {
  static constexpr int kQueryPlane = C::kRows * C::kDim * 2;
  static constexpr int kTilePlane = C::kKeys * C::kDim * 2;

  static constexpr int kWork = 0;
  static constexpr int kTiles = 128;  // the tiles begin here, and so does what takes their place at the end
  static_assert(sizeof(Work<C>) <= kTiles, "a block's plan comes before its tiles");

  static constexpr int kQueries = kTiles;
  static constexpr int kKeys = kQueries + C::kPieces * kQueryPlane;
  static constexpr int kValues = C::kFloat32 ? kKeys : kKeys + kTilePlane;
  static constexpr int kStaging = kValues + C::kPieces * kTilePlane;
  static constexpr int kFlags = kStaging + (C::kFloat32 ? 2 * kTilePlane : 0);
  // A byte for each row of a tile: whether it holds numbers without pieces, see special_numbers.cuh.
  static constexpr int kQueryFlags = kFlags, kKeyFlags = kQueryFlags + C::kRows;
  static constexpr int kValueFlags = kKeyFlags + C::kKeys;
  // Sum, maximum and rounded sum of both rows of each strip of a thread.
  static constexpr int kParked = (kValueFlags + C::kKeys + 7) / 8 * 8;
  static constexpr int kBytes = kParked + (C::kParks ? 3 * C::kStrips * C::kThreads * 8 : 0);

  // At the end, states and outputs of half the warps that divided the keys take the place of the tiles.
  static constexpr int kStateFloats = C::kStrips * 2;
  static constexpr int kExchangeFloats = (3 * kStateFloats + C::kStrips * C::kDimTiles * 4) * kWarp;
  static_assert(C::kRowWarps * (C::kColumnWarps / 2) * kExchangeFloats * 4 <= kFlags - kTiles,
                "the exchange between warps takes the place of the tiles");
  static_assert(C::kRows * C::kDim * 4 <= kFlags - kTiles, "so do the results on their way out");
  static_assert(kBytes <= kMostSharedBytes, "consumer devices have no more for a block");
};

template <class C>
struct SharedMemory {
  using Layout = SharedLayout<C>;
  static constexpr bool kParks = C::kParks;  // see Softmax
  unsigned char* bytes;

  __device__ __forceinline__ unsigned char* queries() const { return bytes + Layout::kQueries; }
  __device__ __forceinline__ unsigned char* keys() const { return bytes + Layout::kKeys; }
  __device__ __forceinline__ unsigned char* values() const { return bytes + Layout::kValues; }
  __device__ __forceinline__ unsigned char* staging() const { return bytes + Layout::kStaging; }
  __device__ __forceinline__ float* exchange() const {
    return reinterpret_cast<float*>(bytes + Layout::kTiles);
  }
  __device__ __forceinline__ Work<C>& work() const {
    return *reinterpret_cast<Work<C>*>(bytes + Layout::kWork);
  }
  __device__ __forceinline__ float2& parked(int thread, int strip, int number) const {
    return reinterpret_cast<float2*>(bytes + Layout::kParked)[(strip * 3 + number) * C::kThreads + thread];
  }
  __device__ __forceinline__ unsigned char* query_flags() const { return bytes + Layout::kQueryFlags; }
  __device__ __forceinline__ unsigned char* key_flags() const { return bytes + Layout::kKeyFlags; }
  __device__ __forceinline__ unsigned char* value_flags() const { return bytes + Layout::kValueFlags; }
};

}  // namespace selfattn::cuda::sm80
