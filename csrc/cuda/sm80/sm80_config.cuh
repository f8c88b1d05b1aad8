// Shapes of the forward's work: which warp owns what, by element type, head dim and path. See
// docs/cuda-kernels.md.
#pragma once

#include "../mma/warp_tiles.cuh"

namespace selfattn::cuda::sm80 {

using mma::Path;

// Rows of a tile are queries, columns keys.
template <class K>
struct Choice : K {
  static constexpr int row_warps() {
    if (K::kFloat32 && K::kDim >= 192) return 2;
    if (K::kFewQuery) return 1;
    if (K::kBare) return K::kDim == 192 ? 8 : 4;
    return !K::kFloat32 && K::kDim > 64 && K::kDim <= 192 ? 8 : 4;
  }
  static constexpr int column_warps() {
    if (K::kFloat32 && K::kDim >= 192) return K::kDim == 192 ? 2 : 1;
    return K::kFewQuery ? 4 : 1;
  }
  // Two strips halve the reads of shared memory, where registers allow.
  static constexpr int strips() { return K::kBare && K::kDim <= 128 ? 2 : 1; }
  static constexpr int columns() {
    if (K::kFloat32)
      return K::kDim == 256 ? 16 : K::kDim == 192 ? 32 : K::kDim == 128 && !K::kFewQuery ? 32 : 64;
    return K::kFewQuery && K::kDim <= 64 ? 128 : 64;
  }
  static constexpr int sum_dim() { return K::kDim; }
};

template <DType kDTypeOf, int kDimOf, Path kPathOf>
struct Config : mma::WarpTiles<Choice<mma::Kind<kDTypeOf, kDimOf, kPathOf>>> {
  static constexpr int kKeys = Config::kColumns;
  static constexpr bool kMayFold = false;          // see Fold in mma/work.cuh
  static constexpr int kExchangeColumns = kDimOf;  // of results that pass through shared memory at a time

  // Whether registers are so scarce that the numbers of rows lie in shared memory while products are
  // computed, and addresses of rows are worked out for every tile.
  static constexpr bool kParks = Config::kBare && kDimOf == 128;

  // Whether registers suffice for what follows from the number of a thread to be kept from tile to tile.
  static constexpr bool kKeepsAddresses = Config::kBare && kDimOf == 64;

  // Blocks for which the registers of a multiprocessor have to do: few queries wait for memory, and few
  // blocks ask for little of it at a time; tiles of 32 dims are small.
  static constexpr int least_blocks() {
    if (Config::kFloat32) return 1;
    if (Config::kFewQuery) return kDimOf <= 96 ? 4 : 1;
    return Config::kBare && kDimOf == 32 ? 3 : 1;
  }

  // Whether nothing comes between the products of a whole tile: with loads that run ahead of all of them,
  // 96 dims spill, and 32 dims where three blocks are to fit.
  static constexpr bool kLean = Config::kBare && kDimOf != 32 && kDimOf != 96;

  // The next smaller padded dim: whatever chooses this one is larger.
  static constexpr int kBelow = kDimOf == 32    ? 0
                                : kDimOf == 64  ? 32
                                : kDimOf == 96  ? 64
                                : kDimOf == 128 ? 96
                                : kDimOf == 192 ? 128
                                                : 192;
  // Whether a step of 16 dims may lie beyond the true dim, and is worth asking: where head dim and value dim
  // differ much, whole runs of four steps are skipped; asking more often would only hinder scheduling.
  static __host__ __device__ constexpr bool asks_whether_beyond(int step) {
    return !kLean && step > 0 && (step % 4 == 0 || step > kBelow / 16);
  }
};

}  // namespace selfattn::cuda::sm80
