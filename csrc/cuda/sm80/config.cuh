// Shapes of the work: which warp owns what, by element type, head dim and path. See docs/cuda-sm80.md.
#pragma once

#include "../../core/dtype.h"

namespace selfattn::cuda::sm80 {

// Three forwards for each type and dim:
enum class Path {
  kPlain,     // see is_plain(); 16-bit types. The one that has to be fast.
  kOptions,   // everything, by flags at run time
  kFewQuery,  // the same for few queries: the warps of a block share its rows and divide the keys
};

// What the shapes of forward and backward are chosen by.
template <DType kDTypeOf, int kDimOf, Path kPathOf>
struct Kind {
  static constexpr DType kDType = kDTypeOf;
  static constexpr int kDim = kDimOf;  // head dim and value dim, padded
  static constexpr Path kPath = kPathOf;
  static constexpr bool kPlain = kPath == Path::kPlain;
  static constexpr bool kFewQuery = kPath == Path::kFewQuery;
  static constexpr bool kFloat32 = kDType == DType::kFloat32;
  static constexpr int kPieces = kFloat32 ? 3 : 1;  // at most, see pieces.cuh
};

// What follows from a choice of warps, strips and columns.
template <class Choice>
struct WarpTiles : Choice {
  static constexpr int kRowWarps = Choice::row_warps();
  static constexpr int kColumnWarps = Choice::column_warps();
  static constexpr int kStrips = Choice::strips();
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kWarpRows = 16 * kStrips;
  static constexpr int kRows = kWarpRows * kRowWarps;      // of a tile
  static constexpr int kColumns = Choice::tile_columns();  // of a tile
  static constexpr int kWarpColumns = kColumns / kColumnWarps;
  static constexpr int kColumnTiles = kWarpColumns / 8;  // of eight columns: those of one product
  static constexpr int kDimTiles = Choice::kDim / 8;
  static_assert(kWarpColumns % 16 == 0, "the second product sums over 16 columns");
};

// Rows of a tile are queries, columns keys.
template <class K>
struct Choice : K {
  static constexpr int row_warps() {
    if (K::kFloat32 && K::kDim >= 192) return 2;
    if (K::kFewQuery) return 1;
    if (K::kPlain) return K::kDim == 192 ? 8 : 4;
    return !K::kFloat32 && K::kDim > 64 && K::kDim <= 192 ? 8 : 4;
  }
  static constexpr int column_warps() {
    if (K::kFloat32 && K::kDim >= 192) return K::kDim == 192 ? 2 : 1;
    return K::kFewQuery ? 4 : 1;
  }
  // Strips of 16 rows that a warp owns. Two halve the reads of shared memory, where registers allow.
  static constexpr int strips() { return K::kPlain && K::kDim <= 128 ? 2 : 1; }
  static constexpr int tile_columns() {
    if (K::kFloat32)
      return K::kDim == 256 ? 16 : K::kDim == 192 ? 32 : K::kDim == 128 && !K::kFewQuery ? 32 : 64;
    return K::kFewQuery && K::kDim <= 64 ? 128 : 64;
  }
};

template <DType kDTypeOf, int kDimOf, Path kPathOf>
struct Config : WarpTiles<Choice<Kind<kDTypeOf, kDimOf, kPathOf>>> {
  static constexpr int kKeys = Config::kColumns;
  static constexpr bool kMayFold = false;          // see Fold in work.cuh
  static constexpr int kExchangeColumns = kDimOf;  // of results that pass through shared memory at a time

  // Whether registers are so scarce that the numbers of rows lie in shared memory while products are
  // computed, and addresses of rows are worked out for every tile.
  static constexpr bool kParks = Config::kPlain && kDimOf == 128;

  // Whether registers suffice for what follows from the number of a thread to be kept from tile to tile.
  static constexpr bool kKeepsAddresses = Config::kPlain && kDimOf == 64;

  // Blocks for which the registers of a multiprocessor have to do: few queries wait for memory, and few
  // blocks ask for little of it at a time; tiles of 32 dims are small.
  static constexpr int least_blocks() {
    if (Config::kFloat32) return 1;
    if (Config::kFewQuery) return kDimOf <= 96 ? 4 : 1;
    return Config::kPlain && kDimOf == 32 ? 3 : 1;
  }

  // Whether nothing comes between the products of a whole tile: with loads that run ahead of all of them,
  // 96 dims spill, and 32 dims where three blocks are to fit.
  static constexpr bool kLean = Config::kPlain && kDimOf != 32 && kDimOf != 96;

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
