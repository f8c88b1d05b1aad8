// Shapes of the backward's work: which warp owns what, by element type, head dim, side and path. See
// docs/cuda-kernels.md.
#pragma once

#include "../config.cuh"

namespace selfattn::cuda::sm80::backward {

// A block owns a tile of rows, and tiles of columns pass by. What the rows are decides what it sums up.
enum class Side {
  kQuery,     // queries own, keys pass: dQ
  kKeyValue,  // keys own, the queries of all heads of their group pass: dK and dV
  kKey,       // dK alone, where registers do not hold both
  kValue,     // dV alone
  kMask,      // queries own, keys pass, for one mask tile after another: the mask's gradient
};

// A pair of operands is what is multiplied for the scores (`first`: queries and keys), another what is
// multiplied for the gradient of the weights (`second`: dO and values). Of each pair the block owns one and
// the other passes.
//
// Paths are the forward's, but that there is none for few queries.
//
// kCareful: NaN and Inf are looked for, and kept from whom they are hidden. float32 always looks; 16-bit
// types compute a tile again with small fragments, which leave room for the code, if its results are not
// finite.
template <DType kDTypeOf, int kDimOf, Side kSideOf, Path kPathOf,
          bool kCarefulOf = kDTypeOf == DType::kFloat32>
struct Config {
  static constexpr DType kDType = kDTypeOf;
  static constexpr int kDim = kDimOf;  // head dim and value dim, padded
  static constexpr Side kSide = kSideOf;
  static constexpr Path kPath = kPathOf;
  static constexpr bool kPlain = kPath == Path::kPlain;
  static constexpr bool kFloat32 = kDType == DType::kFloat32;
  static constexpr int kPieces = kFloat32 ? 3 : 1;  // at most, see pieces.cuh
  static constexpr bool kCareful = kCarefulOf;
  using Careful = Config<kDType, kDim, kSide, kPath, true>;

  static constexpr bool kOwnsQueries = kSide == Side::kQuery || kSide == Side::kMask;
  static constexpr bool kSumsFirst = kSide == Side::kQuery || kSide == Side::kKeyValue || kSide == Side::kKey;
  static constexpr bool kSumsSecond = kSide == Side::kKeyValue || kSide == Side::kValue;
  // Weights alone need no gradient of theirs.
  static constexpr bool kNeedsSecondDots = kSide != Side::kValue;

  // Strips of 16 rows that a warp owns. Two halve the reads of shared memory, where registers allow.
  static constexpr int strips() {
    if (!kPlain || kCareful) return 1;
    if (kDim == 64) return 2;
    return kDim == 128 && kSide != Side::kKeyValue ? 2 : 1;
  }
  static constexpr int row_warps() {
    if (kFloat32) return kDim == 64 ? 4 : 2;
    return kPlain && kDim == 128 && kSide == Side::kKeyValue ? 8 : 4;
  }
  static constexpr int column_warps() { return kFloat32 && kDim == 128 ? 2 : 1; }
  static constexpr int tile_columns() {
    if (kFloat32) return 32;
    if (kCareful) return 16;
    if (kDim == 256) return 32;
    if (kPlain) return kDim == 64 && kSide == Side::kKeyValue ? 32 : kDim == 128 && strips() == 2 ? 32 : 64;
    return kDim == 128 && kSumsSecond ? 32 : 64;
  }

  static constexpr int kStrips = strips();
  static constexpr int kRowWarps = row_warps();
  static constexpr int kColumnWarps = column_warps();
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kWarpRows = 16 * kStrips;
  static constexpr int kRows = kWarpRows * kRowWarps;  // of a tile
  static constexpr int kColumns = tile_columns();      // of a tile
  static constexpr int kWarpColumns = kColumns / kColumnWarps;
  static constexpr int kColumnTiles = kWarpColumns / 8;  // of eight columns: those of one product
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kQueries = kOwnsQueries ? kRows : kColumns;  // of a tile
  static constexpr int kKeys = kOwnsQueries ? kColumns : kRows;
  static_assert(kWarpColumns % 16 == 0, "an accumulation sums over 16 columns");

  // Whether a step of 16 dims may lie beyond the true dim, and is worth asking: see the forward's.
  static __host__ __device__ constexpr bool asks_whether_beyond(int step) {
    return step > 0 && (step % 4 == 0 || !kPlain);
  }
};

}  // namespace selfattn::cuda::sm80::backward
