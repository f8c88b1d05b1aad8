// Shapes of the work on Hopper: two warpgroups compute with 64 queries each, a third brings what they need.
// The names are those of sm80/config.cuh, so that what sm80 does to a warp's registers serves here, too: a
// product of a warpgroup leaves in each warp what a product of sm80 leaves there.
#pragma once

#include "../../core/dtype.h"

namespace selfattn::cuda::sm90 {

// Head dim and value dim are padded, the value dim to whole panels of 64 columns: the values' rows are summed
// up, and a product of half a panel is nowhere documented. kPlain: see is_plain() in sm80/plan.h.
template <DType kDTypeOf, int kDimOf, int kValueDimOf, bool kPlainOf>
struct Config {
  static constexpr DType kDType = kDTypeOf;
  static constexpr bool kBFloat16 = kDTypeOf == DType::kBFloat16;
  static constexpr int kDim = kDimOf;
  static constexpr int kValueDim = kValueDimOf;
  static constexpr bool kPlain = kPlainOf;

  // What sm80's kernels choose and these do not.
  static constexpr bool kFewQuery = false, kFloat32 = false, kParks = false;
  static constexpr int kPieces = 1, kStrips = 1, kColumnWarps = 1;
  static constexpr bool kMayFold = true;  // which they do not, see sm80/work.cuh

  static constexpr bool kKeepsAddresses = kPlainOf;  // see sm80

  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kGroupThreads = 128, kGroupRows = 64;
  static constexpr int kConsumers = kGroups * kGroupThreads;  // the first threads of a block
  static constexpr int kThreads = kConsumers + kGroupThreads;
  static constexpr int kRowWarps = kConsumers / 32, kWarpRows = 16;
  static constexpr int kRows = kGroups * kGroupRows;  // of a tile: queries

  // Keys of a tile: as many as registers (scores, weights and outputs of 64 rows) and shared memory allow.
  static constexpr int kKeys = kDimOf == 256 || !kPlainOf ? 64 : kDimOf == 192 ? 96 : 128;
  static constexpr int kColumns = kKeys, kWarpColumns = kKeys;
  static constexpr int kColumnTiles = kKeys / 8;
  static constexpr int kDimTiles = kValueDimOf / 8;
  static constexpr int kPanels = (kDimOf + 63) / 64, kValuePanels = kValueDimOf / 64;
  static_assert(kValueDimOf % 64 == 0, "panels are whole");

  static constexpr int kStages = kDimOf <= 64 ? 3 : 2;  // of keys, and of values
  static constexpr int kExchangeColumns = 64;           // see sm80/epilogue.cuh

  // Whether a warpgroup computes weights while its product of the weights before with values runs. That takes
  // registers for both.
  static constexpr bool kOverlaps = kValueDimOf < 192;

  // What a warpgroup that computes takes, and what the other keeps: 2 * 128 * 224 + 128 * 56 of 65,536.
  static constexpr int kRegisters = kPlainOf ? 224 : 216, kProducerRegisters = kPlainOf ? 56 : 72;
};

}  // namespace selfattn::cuda::sm90
