// The forward's warps and tiles on Hopper, by element type, dims and path.
//
// Two warpgroups compute with 64 queries each, and a third loads what they need. A product of a warpgroup
// leaves in each of its four warps what a product of mma.sync leaves in a warp, so that mma/'s functions for
// a warp's registers serve here, too.
#pragma once

#include "../mma/warp_tiles.cuh"

namespace selfattn::cuda::sm90 {

// Head dim and value dim are padded, the value dim to whole panels of 64 columns: rows of values are summed
// up, and no document says how to multiply half a panel.
template <class K, int kValueDimOf>
struct Choice : K {
  static constexpr int kValueDim = kValueDimOf;
  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kGroupThreads = 128, kGroupRows = 64;

  static constexpr int row_warps() { return kGroups * kGroupThreads / 32; }
  static constexpr int column_warps() { return 1; }
  static constexpr int strips() { return 1; }
  // As many keys as registers (scores, weights and outputs of 64 rows) and shared memory allow.
  static constexpr int columns() { return K::kDim == 256 || !K::kBare ? 64 : K::kDim == 192 ? 96 : 128; }
  static constexpr int sum_dim() { return kValueDim; }
};

template <DType kDTypeOf, int kDimOf, int kValueDimOf, bool kBareOf>
struct Config
    : mma::WarpTiles<Choice<mma::Kind<kDTypeOf, kDimOf, kBareOf ? mma::Path::kBare : mma::Path::kOptions>,
                            kValueDimOf>> {
  static constexpr bool kBFloat16 = kDTypeOf == DType::kBFloat16;
  static constexpr int kKeys = Config::kColumns;
  static constexpr bool kMayFold = true;            // see Fold in mma/work.cuh
  static constexpr bool kKeepsAddresses = kBareOf;  // see this_thread() in mma/fragments.cuh
  static constexpr int kExchangeColumns = 64;       // see mma/epilogue.cuh

  static constexpr int kBlockThreads = Config::kThreads + Config::kGroupThreads;
  static constexpr int kPanels = (kDimOf + 63) / 64, kValuePanels = kValueDimOf / 64;
  static_assert(kValueDimOf % 64 == 0, "panels are whole");

  static constexpr int kStages =
      kDimOf <= 64 ? 3 : 2;  // tiles of keys, and of values, that shared memory holds

  // Whether a warpgroup computes weights while its product of the previous weights with values runs. That
  // takes registers for both.
  static constexpr bool kOverlaps = kValueDimOf < 192;

  // Registers of a thread of the warpgroups that compute, and of the producer: 2 * 128 * 224 + 128 * 56 of
  // 65,536.
  static constexpr int kRegisters = kBareOf ? 224 : 216, kProducerRegisters = kBareOf ? 56 : 72;
};

}  // namespace selfattn::cuda::sm90
