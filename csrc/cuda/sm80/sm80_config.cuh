// The forward's warps and tiles, by element type, head dim and path. See docs/cuda-sm80.md.
#pragma once

#include "../mma/warp_tiles.cuh"

namespace selfattn::cuda::sm80 {

using mma::Path;

// The rows of a tile are queries, its columns keys.
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
  static constexpr int kExchangeColumns = kDimOf;  // columns of results in shared memory at a time

  // Whether registers are so scarce that the numbers of rows lie in shared memory while products are
  // computed, and addresses of rows are worked out for every tile.
  static constexpr bool kParks = Config::kBare && kDimOf == 128;

  // Whether registers suffice to keep from tile to tile what follows from the number of a thread.
  static constexpr bool kKeepsAddresses = Config::kBare && kDimOf == 64;

  // The number of blocks that the registers of a multiprocessor must suffice for. Few queries wait for
  // memory, and few blocks would ask for little of it at a time; tiles of 32 dims are small.
  static constexpr int least_blocks() {
    if (Config::kFloat32) return 1;
    if (Config::kFewQuery) return kDimOf <= 96 ? 4 : 1;
    return Config::kBare && kDimOf == 32 ? 3 : 1;
  }

  // Whether no branch comes between the products of a whole tile. With loads that run ahead of all of them 96
  // dims would spill, and so would 32 dims, where three blocks must fit.
  static constexpr bool kLean = Config::kBare && kDimOf != 32 && kDimOf != 96;

  // The next smaller padded dim: head dim or value dim is larger than that.
  static constexpr int kBelow = kDimOf == 32    ? 0
                                : kDimOf == 64  ? 32
                                : kDimOf == 96  ? 64
                                : kDimOf == 128 ? 96
                                : kDimOf == 192 ? 128
                                                : 192;
  // Whether a step of 16 dims may lie beyond the true dim and a test for it pays. If head dim and value dim
  // differ much, whole runs of four steps are skipped; more tests would only hinder scheduling.
  static __host__ __device__ constexpr bool asks_whether_beyond(int step) {
    return !kLean && step > 0 && (step % 4 == 0 || step > kBelow / 16);
  }
};

}  // namespace selfattn::cuda::sm80
