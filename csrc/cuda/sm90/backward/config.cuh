// Shapes of the backward's work on Hopper. As in sm80/backward, a block owns rows, which are queries or keys,
// and columns pass by; a product of a warpgroup leaves in each warp what products of sm80 leave there, so
// that what sm80 does to a tile in registers serves here, too.
#pragma once

#include "../../sm80/backward/config.cuh"

namespace selfattn::cuda::sm90::backward {

using sm80::backward::Side;

// Head dim and value dim are padded to multiples of 16, which a product takes at a time, and in shared memory
// to whole panels of 64 columns, as what is summed up is.
template <DType kDTypeOf, int kDimOf, int kValueDimOf, Side kSideOf, bool kPlainOf, bool kCarefulOf = false>
struct Config : sm80::backward::Choice<
                    sm80::Kind<kDTypeOf, kDimOf, kPlainOf ? sm80::Path::kPlain : sm80::Path::kOptions>,
                    kSideOf, kCarefulOf> {
  using Careful = Config<kDTypeOf, kDimOf, kValueDimOf, kSideOf, kPlainOf, true>;

  static constexpr bool kBFloat16 = kDTypeOf == DType::kBFloat16;
  static constexpr bool kKeepsAddresses = false, kReadsDelta = false;  // see sm80's

  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kGroupThreads = 128, kGroupRows = 64;
  static constexpr int kThreads = kGroups * kGroupThreads;  // that compute: the first of a block
  static constexpr int kBlockThreads = kThreads + kGroupThreads;
  static constexpr int kStrips = 1, kWarpRows = 16, kRowWarps = kThreads / 32, kColumnWarps = 1;
  static constexpr int kRows = kGroups * kGroupRows;

  // Of the operands of scores and of what is summed up with them, of those of the weights' gradients and of
  // what is summed up with these.
  static constexpr int kFirstDim = kDimOf, kSecondDim = kValueDimOf;
  static constexpr int kFirstPanels = (kFirstDim + 63) / 64, kSecondPanels = (kSecondDim + 63) / 64;
  static constexpr int kSumDim = (kSideOf == Side::kValue ? kSecondPanels : kFirstPanels) * 64;
  static constexpr int kDimTiles = kSumDim / 8, kExchangeColumns = kSumDim;
  static_assert(kSideOf != Side::kKeyValue || kFirstDim == kSecondDim, "one shape for both sums");

  // Columns that pass by as one tile, and those of them that are computed with at a time: as many as leave
  // registers for the sums of a row and for what options or special numbers need.
  static constexpr int tile_columns() {
    if (!kPlainOf || kDimOf > 128) return 64;
    return kDimOf > 64 && kSideOf == Side::kKeyValue ? 64 : 128;
  }
  static constexpr int columns() {
    if (kCarefulOf || (!kPlainOf && kDimOf > 64 && kSideOf != Side::kValue)) return 32;
    return kSideOf == Side::kKeyValue ? 64 : tile_columns();
  }
  static constexpr int kTileColumns = tile_columns(), kColumns = columns();
  static constexpr int kWarpColumns = kColumns, kColumnTiles = kColumns / 8;
  static constexpr int kTileQueries = Config::kOwnsQueries ? kRows : kTileColumns;
  static constexpr int kTileKeys = Config::kOwnsQueries ? kTileColumns : kRows;

  // Tiles of either passing operand that are known at a time. Of the widest there is room for one of the
  // second, which is done with first where it is not summed up.
  static constexpr int kFirstStages = 2;
  static constexpr int kSecondStages = kSecondDim == 256 && Config::kNeedsSecondDots ? 1 : 2;

  // What a warpgroup that computes takes, and what the other keeps: 2 * 128 * 240 + 128 * 24 of 65,536.
  static constexpr int kRegisters = kPlainOf ? 240 : 224, kProducerRegisters = kPlainOf ? 24 : 56;
};

}  // namespace selfattn::cuda::sm90::backward
