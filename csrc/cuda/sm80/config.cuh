// Shapes of the work: which warp owns what, by element type, head dim and path. See docs/cuda-kernels.md.
#pragma once

#include "../../core/dtype.h"

namespace selfattn::cuda::sm80 {

// Three forwards for each type and dim:
enum class Path {
  kPlain,     // see is_plain(); 16-bit types. The one that has to be fast.
  kOptions,   // everything, by flags at run time
  kFewQuery,  // the same for few queries: the warps of a block share its rows and divide the keys
};

template <DType kDTypeOf, int kDimOf, Path kPathOf>
struct Config {
  static constexpr DType kDType = kDTypeOf;
  static constexpr int kDim = kDimOf;  // head dim and value dim, padded
  static constexpr Path kPath = kPathOf;
  static constexpr bool kPlain = kPath == Path::kPlain;
  static constexpr bool kFewQuery = kPath == Path::kFewQuery;
  static constexpr bool kFloat32 = kDType == DType::kFloat32;
  static constexpr int kPieces = kFloat32 ? 3 : 1;  // at most, see pieces.cuh

  static constexpr int row_warps() {
    if (kFloat32 && kDim >= 192) return 2;
    if (kFewQuery) return 1;
    if (kPlain) return kDim == 192 ? 8 : 4;
    return !kFloat32 && kDim > 64 && kDim <= 192 ? 8 : 4;
  }
  static constexpr int column_warps() {
    if (kFloat32 && kDim >= 192) return kDim == 192 ? 2 : 1;
    return kFewQuery ? 4 : 1;
  }
  // Strips of 16 rows that a warp owns. Two halve the reads of shared memory, where registers allow.
  static constexpr int strips() { return kPlain && kDim <= 128 ? 2 : 1; }
  static constexpr int tile_keys() {
    if (kFloat32) return kDim == 256 ? 16 : kDim == 192 ? 32 : kDim == 128 && !kFewQuery ? 32 : 64;
    return kFewQuery && kDim <= 64 ? 128 : 64;
  }

  // Whether the numbers of rows lie in shared memory while products are computed, as registers have no room.
  static constexpr bool kParks = kPlain && kDim == 128;

  static constexpr int kRowWarps = row_warps();
  static constexpr int kColumnWarps = column_warps();
  static constexpr int kStrips = strips();
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kWarpRows = 16 * kStrips;
  static constexpr int kRows = kWarpRows * kRowWarps;  // of a tile
  static constexpr int kKeys = tile_keys();            // of a tile
  static constexpr int kWarpColumns = kKeys / kColumnWarps;
  static constexpr int kColumnTiles = kWarpColumns / 8;  // of eight keys: the columns of one product
  static constexpr int kDimTiles = kDim / 8;
  static_assert(kWarpColumns % 16 == 0, "a product with values sums over 16 keys");

  // The next smaller padded dim: whatever chooses this one is larger.
  static constexpr int kBelow = kDim == 32    ? 0
                                : kDim == 64  ? 32
                                : kDim == 96  ? 64
                                : kDim == 128 ? 96
                                : kDim == 192 ? 128
                                              : 192;
  // Whether a step of 16 dims may lie beyond the true dim, and is worth asking: where head dim and value dim
  // differ much, whole runs of four steps are skipped; asking more often would only hinder scheduling.
  static __host__ __device__ constexpr bool asks_whether_beyond(int step) {
    return step > 0 && (step % 4 == 0 || step > kBelow / 16);
  }
};

}  // namespace selfattn::cuda::sm80
