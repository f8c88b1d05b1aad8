// The backward's warps and tiles, by element type, head dim, side and path. See docs/cuda-sm80-backward.md.
#pragma once

#include "../../mma/backward/backward_kind.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::Path;
using mma::backward::Side;

template <class K>
struct Choice : K {
  // Two strips halve the reads of shared memory, where registers allow.
  static constexpr int strips() {
    if (!K::kBare || K::kCareful) return 1;
    if (K::kDim == 64) return 2;
    return K::kDim == 128 && K::kSide != Side::kKeyValue ? 2 : 1;
  }
  static constexpr int row_warps() {
    if (K::kFloat32) return K::kDim == 64 ? 4 : 2;
    return K::kBare && K::kDim == 128 && K::kSide == Side::kKeyValue ? 8 : 4;
  }
  static constexpr int column_warps() { return K::kFloat32 && K::kDim == 128 ? 2 : 1; }
  static constexpr int columns() {
    if (K::kFloat32) return 32;
    if (K::kCareful) return 16;
    if (K::kDim == 256) return 32;
    if (!K::kBare) return K::kDim == 128 && K::kSumsVO ? 32 : 64;
    if (K::kDim == 64 && K::kSide == Side::kKeyValue) return 32;
    return K::kDim == 128 && strips() == 2 ? 32 : 64;
  }
  static constexpr int sum_dim() { return K::kDim; }
};

template <DType kDTypeOf, int kDimOf, Side kSideOf, Path kPathOf,
          bool kCarefulOf = kDTypeOf == DType::kFloat32>
struct Config
    : mma::WarpTiles<
          Choice<mma::backward::BackwardKind<mma::Kind<kDTypeOf, kDimOf, kPathOf>, kSideOf, kCarefulOf>>> {
  using Careful = Config<kDTypeOf, kDimOf, kSideOf, kPathOf, true>;

  static constexpr int kTileColumns = Config::kColumns;  // columns that pass by as one tile
  static constexpr int kQueries = Config::kOwnsQueries ? Config::kRows : Config::kColumns;
  static constexpr int kKeys = Config::kOwnsQueries ? Config::kColumns : Config::kRows;

  static constexpr bool kKeepsAddresses = false;  // see the forward's
  static constexpr int kExchangeColumns = kDimOf;

  // Whether a row's delta is read where the statistics kernel left it, and not from shared memory, which two
  // blocks of a multiprocessor fill: that of an A100 at 128 dims, of a consumer device at 64.
  static constexpr bool kReadsDelta = Config::kBare && kSideOf == Side::kQuery && !kCarefulOf;

  // Whether a step of 16 dims may lie beyond the true dim and a test for it pays: see the forward's.
  static __host__ __device__ constexpr bool asks_whether_beyond(int step) {
    return step > 0 && (Config::kBare ? kDimOf == 256 && step % 4 == 0 : true);
  }
};

}  // namespace selfattn::cuda::sm80::backward
