// From the products of a tile to weights and gradients of scores.
#pragma once

#include "../../common/elementary.cuh"
#include "shared_layout.cuh"

namespace selfattn::cuda::sm80::backward {

template <class C>
struct MaskBits {
  // Reads the mask of a tile. Returns whether it shows anything to some row of the warp.
  __device__ __forceinline__ bool load(const Plan&, const Work<C>&, const Lane<C>&, Passing) { return true; }
};

template <class C>
struct Slopes {
  __device__ __forceinline__ void reset() {}
  __device__ __forceinline__ void write(const Plan&, const Work<C>&, const Lane<C>&) {}
};

// s: dot products of queries and keys, becomes the weights P, dropped but without the survivors' factor
// plan.dropout_scale (the result's). dp: dot products of dO and values, becomes the gradients of the dot
// products but for the factor plan.scale (the result's too). Sides that do not need dp leave it undefined.
template <class C>
__device__ __forceinline__ void weigh(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                      const SharedMemory<C>& shared, Passing passing, const MaskBits<C>&,
                                      Slopes<C>&, Scores<C>& s, Scores<C>& dp) {
  const AttentionParams& p = plan.params;
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = lane.row(strip, half), column = lane.column(tile) + i;
          const int query = work.query(passing, row, column), key = work.key(passing, row, column);
          const int at = C::kOwnsQueries ? row : column;
          const KeyRange range = visible_keys(p, query, query);
          float& score = s.at[strip][tile][2 * half + i];
          const bool seen = query < p.queries && key >= range.begin && key < range.end;
          const float weight = C::kPlain
                                   ? ptx::exp2_approx(fmaf(score, plan.scale_log2, -shared.shift()[at]))
                                   : exponential(rounded_product(score, plan.scale) - shared.shift()[at]) *
                                         shared.inverse_sum()[at];
          score = seen ? weight : 0.0f;
          if constexpr (C::kNeedsSecondDots) {
            float& gradient = dp.at[strip][tile][2 * half + i];
            gradient = seen ? weight * (gradient - shared.delta()[at]) : 0.0f;
          }
        }
      }
    }
  }
}

}  // namespace selfattn::cuda::sm80::backward
