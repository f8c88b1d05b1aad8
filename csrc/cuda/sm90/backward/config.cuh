// Shapes of the backward's work on Hopper. As in sm80/backward, a block owns rows, which are queries or keys,
// and columns pass by; a product of a warpgroup leaves in each warp what products of sm80 leave there, so
// that what sm80 does to a tile in registers serves here, too.
#pragma once

#include "../../sm80/backward/config.cuh"

namespace selfattn::cuda::sm90::backward {

using sm80::backward::Side;

template <DType kDTypeOf, int kDimOf, bool kPlainOf>
using Kind = sm80::Kind<kDTypeOf, kDimOf, kPlainOf ? sm80::Path::kPlain : sm80::Path::kOptions>;

template <DType kDTypeOf, int kDimOf, Side kSideOf, bool kPlainOf, bool kCarefulOf = false>
struct Config : sm80::backward::Choice<Kind<kDTypeOf, kDimOf, kPlainOf>, kSideOf, kCarefulOf> {
  using Careful = Config<kDTypeOf, kDimOf, kSideOf, kPlainOf, true>;

  static constexpr bool kBFloat16 = kDTypeOf == DType::kBFloat16;
  static constexpr bool kKeepsAddresses = false, kReadsDelta = false;  // see sm80's

  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kGroupThreads = 128, kGroupRows = 64;
  static constexpr int kThreads = kGroups * kGroupThreads;  // that compute: the first of a block
  static constexpr int kBlockThreads = kThreads + kGroupThreads;
  static constexpr int kStrips = 1, kWarpRows = 16, kRowWarps = kThreads / 32, kColumnWarps = 1;
  static constexpr int kRows = kGroups * kGroupRows;

  // Columns that pass by as one tile, and those of them that are computed with at a time: as many as leave
  // registers for the sums of a row and for what options or special numbers need.
  static constexpr int tile_columns() {
    if (!kPlainOf || kDimOf == 256) return 64;
    return kDimOf == 128 && kSideOf == Side::kKeyValue ? 64 : 128;
  }
  static constexpr int kTileColumns = tile_columns();
  static constexpr bool kIsCrowded = !kPlainOf && kDimOf == 128 && kSideOf == Side::kKeyValue;
  static constexpr int kColumns = kCarefulOf || kIsCrowded ? 32 : kTileColumns;
  static constexpr int kParts = kTileColumns / kColumns;
  static constexpr int kWarpColumns = kColumns, kColumnTiles = kColumns / 8, kDimTiles = kDimOf / 8;
  static constexpr int kTileQueries = Config::kOwnsQueries ? kRows : kTileColumns;
  static constexpr int kTileKeys = Config::kOwnsQueries ? kTileColumns : kRows;
  static constexpr int kPanels = kDimOf / 64;
  static constexpr int kExchangeColumns = kDimOf;
  static_assert(kDimOf % 64 == 0, "panels are whole");

  // Tiles that are known at a time of either passing operand. The second is done with before the first.
  static constexpr int kFirstStages = 2, kSecondStages = kDimOf == 256 ? 1 : 2;

  // As in the forward.
  static constexpr int kRegisters = 224, kProducerRegisters = 56;
};

}  // namespace selfattn::cuda::sm90::backward
