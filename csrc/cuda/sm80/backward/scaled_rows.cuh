// Rows of gradients that are kept scaled up while the gradients are too small for pieces.
//
// Gradients of scores are proportional to dO, which may be of any magnitude, and below 2^-80 the last pieces
// of a float32 begin to vanish (mma/pieces.cuh). So each row of a sum is kept 2^40 times too large until a
// tile has a gradient that is not small. That is exact, and depends on the row alone. Until then scaled
// gradients are below 2^-40, so that not even the terms of the largest numbers
// (mma/backward/special_terms.cuh) overflow.
#pragma once

#include "../../mma/fragments.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::Output;
using mma::Scores;

template <class C>
class ScaledRows {
 public:
  __device__ __forceinline__ void reset() { up_ = ~0u; }

  // Scales gradients as their rows are, and the sums so far where that changes. Collective of the warp.
  __device__ __forceinline__ void scale(Scores<C>& ds, Output<C>& sums) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = 0.0f;
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
          const float* pair = &ds.at[strip][tile][2 * half];
          most = larger(most, larger(fabsf(pair[0]), fabsf(pair[1])));
        }
        most = mma::max_of_row(most);
        const bool grows = is_up(strip, half) && most >= kSmall;
        if (grows) up_ &= ~bit(strip, half);
        const float factor = is_up(strip, half) ? kUp : 1.0f;
        if (__any_sync(kWholeWarp, grows)) mma::scale_row(sums.at, strip, half, grows ? kDown : 1.0f);
        mma::scale_row(ds.at, strip, half, factor);
      }
    }
  }

  // To be called after the last tile: undoes the scale of the sums.
  __device__ __forceinline__ void undo(Output<C>& sums) const {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma::scale_row(sums.at, strip, half, is_up(strip, half) ? kDown : 1.0f);
      }
    }
  }

 private:
  static constexpr float kUp = 1099511627776.0f;  // 2^40
  static constexpr float kDown = 1.0f / kUp;
  static constexpr float kSmall = kDown * kDown;

  static __device__ __forceinline__ uint32_t bit(int strip, int half) { return 1u << (strip * 2 + half); }
  __device__ __forceinline__ bool is_up(int strip, int half) const { return up_ & bit(strip, half); }

  uint32_t up_;  // a bit for each row of the lane whose sums are still scaled up
};

}  // namespace selfattn::cuda::sm80::backward
