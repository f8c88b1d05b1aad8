// Shared memory of a block of the backward.
#pragma once

#include <algorithm>

#include "../../mma/backward/backward_work.cuh"
#include "../sm80_shared_memory.cuh"
#include "sm80_backward_config.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::backward::Work;

// Places in bytes from the start of the block's shared memory. float32 tiles are planes of bfloat16 pieces.
template <class C>
struct SharedLayout {
  static constexpr int kOwnPlane = C::kRows * C::kDim * 2;
  static constexpr int kPassingPlane = C::kColumns * C::kDim * 2;

  static constexpr int kWork = 0;
  static constexpr int kTiles = 128;  // the tiles begin here, and so does what takes their place at the end
  static_assert(sizeof(Work<C>) <= kTiles, "a block's plan comes before its tiles");

  static constexpr int kOwnQK = kTiles;
  static constexpr int kOwnVO = kOwnQK + C::kPieces * kOwnPlane;
  static constexpr int kPassingQK = kOwnVO + (C::kNeedsDP ? C::kPieces * kOwnPlane : 0);
  static constexpr int kPassingVO = kPassingQK + C::kPieces * kPassingPlane;
  // At the end, sums of the warps that divided the columns, and then results, take the tiles' place.
  static constexpr int kTilesEnd = kPassingVO + C::kPieces * kPassingPlane;
  static constexpr int kResultsEnd = kTiles + C::kRows * C::kDim * 4;
  static constexpr int kStatistics = std::max(kTilesEnd, kResultsEnd);
  static constexpr int kShift = kStatistics;
  static constexpr int kInverseSum = kShift + C::kQueries * 4;
  static constexpr int kDelta = kInverseSum + (C::kBare ? 0 : C::kQueries * 4);
  // A byte for each row of a tile: whether it holds numbers that products cannot take. If two blocks must
  // fit, only the Config that computes a tile again has these flags; its room is there, as its tiles are
  // smaller.
  static constexpr bool kHasFlags = C::kCareful || C::kSide != Side::kQuery;
  static constexpr int kFlags = kDelta + (C::kReadsDelta ? 0 : C::kQueries * 4);
  // Totals of the mask's gradient: see ../../mask/line_totals.cuh.
  static constexpr int kTotals = kFlags + (kHasFlags ? 2 * C::kRows + 2 * C::kColumns : 0);
  static constexpr int kLines = std::max(C::kRows, C::kColumns);
  static constexpr int kBytes = kTotals + (C::kSide == Side::kMask ? kLines * 8 : 0);
  static_assert(kTotals % 8 == 0, "totals are float64");

  static_assert(kBytes <= kMostSharedBytes, "consumer devices have no more for a block");
};

template <class C>
struct SharedMemory {
  using Layout = SharedLayout<C>;
  unsigned char* bytes;

  __device__ __forceinline__ Work<C>& work() const {
    return *reinterpret_cast<Work<C>*>(bytes + Layout::kWork);
  }
  __device__ __forceinline__ unsigned char* own_qk() const { return bytes + Layout::kOwnQK; }
  __device__ __forceinline__ unsigned char* own_vo() const { return bytes + Layout::kOwnVO; }
  __device__ __forceinline__ unsigned char* passing_qk() const { return bytes + Layout::kPassingQK; }
  __device__ __forceinline__ unsigned char* passing_vo() const { return bytes + Layout::kPassingVO; }
  __device__ __forceinline__ float* exchange() const {
    return reinterpret_cast<float*>(bytes + Layout::kTiles);
  }

  // Statistics of the tile's queries, which are rows or columns. Not every Config has all of them, see
  // Layout.
  __device__ __forceinline__ float* shift() const { return floats(Layout::kShift); }
  __device__ __forceinline__ float* inverse_sum() const { return floats(Layout::kInverseSum); }
  __device__ __forceinline__ float* delta() const { return floats(Layout::kDelta); }

  __device__ __forceinline__ unsigned char* own_qk_flags() const { return bytes + Layout::kFlags; }
  __device__ __forceinline__ unsigned char* own_vo_flags() const { return own_qk_flags() + C::kRows; }
  __device__ __forceinline__ unsigned char* passing_qk_flags() const { return own_qk_flags() + 2 * C::kRows; }
  __device__ __forceinline__ unsigned char* passing_vo_flags() const {
    return passing_qk_flags() + C::kColumns;
  }
  __device__ __forceinline__ double* totals() const {
    return reinterpret_cast<double*>(bytes + Layout::kTotals);
  }

 private:
  __device__ __forceinline__ float* floats(int at) const { return reinterpret_cast<float*>(bytes + at); }
};

}  // namespace selfattn::cuda::sm80::backward
