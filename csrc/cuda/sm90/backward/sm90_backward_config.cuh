// The backward's warps and tiles on Hopper, by element type, dims, side and path.
//
// A block owns rows, which are queries or keys, and columns pass by. A product of a warpgroup leaves in each
// of its four warps what a product of mma.sync leaves in a warp, so that mma/'s functions for a tile in
// registers serve here, too.
#pragma once

#include "../../mma/backward/backward_kind.cuh"

namespace selfattn::cuda::sm90::backward {

using mma::backward::Side;

// Head dim (of qk) and value dim (of vo) are padded to multiples of 16, which a product takes at a time. In
// shared memory, and where they are summed up, they are padded to whole panels of 64 columns.
template <class K, int kValueDimOf>
struct Choice : K {
  static constexpr int kQKDim = K::kDim, kVODim = kValueDimOf;
  static constexpr int kQKPanels = (kQKDim + 63) / 64, kVOPanels = (kVODim + 63) / 64;
  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kGroupThreads = 128, kGroupRows = 64;

  static constexpr int row_warps() { return kGroups * kGroupThreads / 32; }
  static constexpr int column_warps() { return 1; }
  static constexpr int strips() { return 1; }
  // The columns that pass by as one tile, and those of them that are computed with at a time: as many as
  // leave registers for the sums of a row and for what options or special numbers need.
  static constexpr int tile_columns() {
    if (!K::kBare || K::kDim > 128) return 64;
    return K::kDim > 64 && K::kSide == Side::kKeyValue ? 64 : 128;
  }
  static constexpr int columns() {
    if (K::kCareful || (!K::kBare && K::kDim > 64 && K::kSide != Side::kValue)) return 32;
    return K::kSide == Side::kKeyValue ? 64 : tile_columns();
  }
  static constexpr int sum_dim() { return (K::kSide == Side::kValue ? kVOPanels : kQKPanels) * 64; }
  static_assert(K::kSide != Side::kKeyValue || kQKDim == kVODim, "one shape for both sums");
};

template <DType kDTypeOf, int kDimOf, Side kSideOf, bool kBareOf, bool kCarefulOf>
using KindOf =
    mma::backward::BackwardKind<mma::Kind<kDTypeOf, kDimOf, kBareOf ? mma::Path::kBare : mma::Path::kOptions>,
                                kSideOf, kCarefulOf>;

template <DType kDTypeOf, int kDimOf, int kValueDimOf, Side kSideOf, bool kBareOf, bool kCarefulOf = false>
struct Config : mma::WarpTiles<Choice<KindOf<kDTypeOf, kDimOf, kSideOf, kBareOf, kCarefulOf>, kValueDimOf>> {
  using Careful = Config<kDTypeOf, kDimOf, kValueDimOf, kSideOf, kBareOf, true>;

  static constexpr bool kBFloat16 = kDTypeOf == DType::kBFloat16;
  static constexpr bool kKeepsAddresses = false;  // see this_thread() in mma/fragments.cuh
  static constexpr bool kReadsDelta = false;      // from global memory: it is in shared memory with the rest
  static constexpr int kSumDim = Config::sum_dim(), kExchangeColumns = kSumDim;

  static constexpr int kBlockThreads = Config::kThreads + Config::kGroupThreads;
  static constexpr int kTileColumns = Config::tile_columns();
  static constexpr int kTileQueries = Config::kOwnsQueries ? Config::kRows : kTileColumns;
  static constexpr int kTileKeys = Config::kOwnsQueries ? kTileColumns : Config::kRows;

  // The tiles of each passing operand that are known at a time. At a value dim of 256 there is room for one
  // of vo where its products are needed; it is released early there, as it is not summed up.
  static constexpr int kQKStages = 2;
  static constexpr int kVOStages = Config::kVODim == 256 && Config::kNeedsDP ? 1 : 2;

  // Registers of a thread of the warpgroups that compute, and of the producer: 2 * 128 * 240 + 128 * 24 of
  // 65,536.
  static constexpr int kRegisters = kBareOf ? 240 : 224, kProducerRegisters = kBareOf ? 24 : 56;
};

}  // namespace selfattn::cuda::sm90::backward
