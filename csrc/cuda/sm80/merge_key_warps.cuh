// Warps that divided the keys of the same rows merge their results.
#pragma once

#include "../mma/softmax.cuh"
#include "sm80_shared_memory.cuh"

namespace selfattn::cuda::sm80 {

// Halves of the warps that share rows merge pairwise until the first warp has everything, in place of the
// tiles in shared memory, which are no longer needed.
template <class C>
__device__ __forceinline__ void merge_key_warps(const SharedMemory<C>& shared, const mma::Lane<C>& lane,
                                                mma::Softmax<C, SharedMemory<C>>& softmax,
                                                mma::Output<C>& output) {
  const int warp = lane.thread >> 5, row_warp = warp % C::kRowWarps, key_warp = warp / C::kRowWarps;
#pragma unroll
  for (int left = C::kColumnWarps / 2; left >= 1; left /= 2) {
    float* slot = shared.exchange() +
                  ((key_warp % left) * C::kRowWarps + row_warp) * SharedLayout<C>::kExchangeFloats +
                  lane.lane;
    __syncthreads();
    if (key_warp >= left && key_warp < 2 * left) {
      float* at = slot;
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          at[0] = softmax.max[strip][half];
          at[kWarp] = softmax.sum[strip][half];
          at[2 * kWarp] = softmax.rounded[strip][half];
          at += 3 * kWarp;
        }
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i, at += kWarp) *at = output.at[strip][tile][i];
        }
      }
    }
    __syncthreads();
    if (key_warp < left) {
      const float* at = slot;
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
        float factor[2], other_factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          RowState<float> state{softmax.max[strip][half], softmax.sum[strip][half]};
          state.merge(RowState<float>{at[0], at[kWarp]}, &factor[half], &other_factor[half]);
          softmax.max[strip][half] = state.max;
          softmax.sum[strip][half] = state.sum;
          float& rounding = softmax.rounded[strip][half];
          rounding = rounding * factor[half] + at[2 * kWarp] * other_factor[half];
          at += 3 * kWarp;
        }
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i, at += kWarp) {
            float& sum = output.at[strip][tile][i];
            sum = sum * factor[i / 2] + *at * other_factor[i / 2];
          }
        }
      }
    }
  }
}

}  // namespace selfattn::cuda::sm80
