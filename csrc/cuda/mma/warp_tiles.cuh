// The kinds of kernels, and which warp owns what of their tiles.
#pragma once

#include "../../core/dtype.h"

namespace selfattn::cuda::mma {

// The forward kernels of a type and dim:
enum class Path {
  kBare,      // nothing changes the scores but their scale, see is_bare(); 16-bit types. It has to be fast.
  kOptions,   // every option, by flags at run time
  kFewQuery,  // the same for few queries: the warps of a block share its rows and divide the keys
};

// The shapes of forward and backward kernels are chosen by these.
template <DType kDTypeOf, int kDimOf, Path kPathOf>
struct Kind {
  static constexpr DType kDType = kDTypeOf;
  static constexpr int kDim = kDimOf;  // head dim, padded, and value dim where no other is named
  static constexpr Path kPath = kPathOf;
  static constexpr bool kBare = kPath == Path::kBare;
  static constexpr bool kFewQuery = kPath == Path::kFewQuery;
  static constexpr bool kFloat32 = kDType == DType::kFloat32;
  static constexpr int kPieces = kFloat32 ? 3 : 1;  // at most, see pieces.cuh
};

// The numbers that follow from a choice of warps, strips, columns and the dim of a row's sums. `Choice` is a
// Kind with functions for these. Row warps divide the rows of a tile, column warps its columns.
template <class Choice>
struct WarpTiles : Choice {
  static constexpr int kRowWarps = Choice::row_warps();
  static constexpr int kColumnWarps = Choice::column_warps();
  static constexpr int kStrips = Choice::strips();                // strips of 16 rows that a warp owns
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;  // threads that compute
  static constexpr int kWarpRows = 16 * kStrips;
  static constexpr int kRows = kWarpRows * kRowWarps;  // rows of a tile
  static constexpr int kColumns = Choice::columns();   // columns of a tile
  static constexpr int kWarpColumns = kColumns / kColumnWarps;
  static constexpr int kColumnTiles = kWarpColumns / 8;  // tiles of eight columns: those of one product
  static constexpr int kDimTiles =
      Choice::sum_dim() / 8;  // tiles of eight dims in a row's sums over the columns
  static_assert(kWarpColumns % 16 == 0, "the second product sums over 16 columns");
};

}  // namespace selfattn::cuda::mma
