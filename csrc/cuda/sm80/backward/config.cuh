// Shapes of the backward's work: which warp owns what, by element type, head dim, side and path. See
// docs/cuda-sm80-backward.md.
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
template <class K, Side kSideOf, bool kCarefulOf>
struct Choice : K {
  static constexpr Side kSide = kSideOf;
  static constexpr bool kCareful = kCarefulOf;
  static constexpr bool kOwnsQueries = kSide == Side::kQuery || kSide == Side::kMask;
  static constexpr bool kSumsFirst = kSide == Side::kQuery || kSide == Side::kKeyValue || kSide == Side::kKey;
  static constexpr bool kSumsSecond = kSide == Side::kKeyValue || kSide == Side::kValue;
  // Weights alone need no gradient of theirs.
  static constexpr bool kNeedsSecondDots = kSide != Side::kValue;

  // Strips of 16 rows that a warp owns. Two halve the reads of shared memory, where registers allow.
  static constexpr int strips() {
    if (!K::kPlain || kCareful) return 1;
    if (K::kDim == 64) return 2;
    return K::kDim == 128 && kSide != Side::kKeyValue ? 2 : 1;
  }
  static constexpr int row_warps() {
    if (K::kFloat32) return K::kDim == 64 ? 4 : 2;
    return K::kPlain && K::kDim == 128 && kSide == Side::kKeyValue ? 8 : 4;
  }
  static constexpr int column_warps() { return K::kFloat32 && K::kDim == 128 ? 2 : 1; }
  static constexpr int tile_columns() {
    if (K::kFloat32) return 32;
    if (kCareful) return 16;
    if (K::kDim == 256) return 32;
    if (!K::kPlain) return K::kDim == 128 && kSumsSecond ? 32 : 64;
    if (K::kDim == 64 && kSide == Side::kKeyValue) return 32;
    return K::kDim == 128 && strips() == 2 ? 32 : 64;
  }
};

template <DType kDTypeOf, int kDimOf, Side kSideOf, Path kPathOf,
          bool kCarefulOf = kDTypeOf == DType::kFloat32>
struct Config : WarpTiles<Choice<Kind<kDTypeOf, kDimOf, kPathOf>, kSideOf, kCarefulOf>> {
  using Careful = Config<kDTypeOf, kDimOf, kSideOf, kPathOf, true>;

  // Of a tile.
  static constexpr int kTileColumns = Config::kColumns;  // that pass by together
  static constexpr int kQueries = Config::kOwnsQueries ? Config::kRows : Config::kColumns;
  static constexpr int kKeys = Config::kOwnsQueries ? Config::kColumns : Config::kRows;

  static constexpr bool kKeepsAddresses = false;  // see the forward's
  static constexpr int kExchangeColumns = kDimOf;

  // Whether a row's delta is read where the statistics kernel left it, and not from shared memory, which two
  // blocks of a multiprocessor fill: an A100's at 128 dims, a consumer device's at 64.
  static constexpr bool kReadsDelta = Config::kPlain && kSideOf == Side::kQuery && !kCarefulOf;

  // Whether a step of 16 dims may lie beyond the true dim, and is worth asking: see the forward's.
  static __host__ __device__ constexpr bool asks_whether_beyond(int step) {
    return step > 0 && (Config::kPlain ? kDimOf == 256 && step % 4 == 0 : true);
  }
};

}  // namespace selfattn::cuda::sm80::backward
