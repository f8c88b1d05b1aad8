// Online softmax of the rows that a lane shares with three others (Milakov and Gimelshein 2018).
#pragma once

#include "../common/row_state.cuh"
#include "dropout_bits.cuh"
#include "scores.cuh"

namespace selfattn::cuda::sm80 {

// Over the four lanes of a row.
__device__ __forceinline__ float max_of_row(float x) {
  x = larger(x, __shfl_xor_sync(kAllLanes, x, 1));
  return larger(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <class C>
struct Softmax {
  float max[C::kStrips][2];  // of the row; the plain path keeps it unscaled until finish()
  float sum[C::kStrips][2];  // of the lane's own columns until finish()

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      max[strip][0] = max[strip][1] = -infinity<float>();
      sum[strip][0] = sum[strip][1] = 0.0f;
    }
  }

  // exp(score - max). On the plain path scale and log2(e) are one factor and the difference is one
  // multiply-add. Elsewhere the difference comes first: it is exact near the maximum, where float32 needs
  // that, and a row hidden softly by the least finite number must not overflow.
  static __device__ __forceinline__ float weight(float score, float shift, float scale_log2) {
    if constexpr (C::kPlain) return ptx::exp2_approx(fmaf(score, scale_log2, -shift));
    return ptx::exp2_approx((score - shift) * 1.4426950408889634f);
  }

  // Scores become weights; sums and output so far are brought down to the new maximum.
  __device__ __forceinline__ void step(float scale_log2, Scores<C>& scores, Output<C>& output) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = max[strip][half];
#pragma unroll
        for (int tile = 0; tile < C::kKeyTiles; ++tile) {
          const float* s = &scores.at[strip][tile][2 * half];
          most = larger(most, larger(s[0], s[1]));
        }
        most = max_of_row(most);
        const float shift =
            C::kPlain ? rounded_product(softmax_shift(most), scale_log2) : softmax_shift(most);
        const float rescale = weight(max[strip][half], shift, scale_log2);
        max[strip][half] = most;
        float total = sum[strip][half] * rescale;
#pragma unroll
        for (int tile = 0; tile < C::kKeyTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores.at[strip][tile][2 * half + i];
            s = weight(s, shift, scale_log2);
            total += s;
          }
        }
        sum[strip][half] = total;
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
          output.at[strip][tile][2 * half] *= rescale;
          output.at[strip][tile][2 * half + 1] *= rescale;
        }
      }
    }
  }

  // The plain path subtracts the rounded product of maximum and scale from exact ones. Here sums and output
  // become those of the exact maximum, or sums of large scores would be off by what that rounding was.
  __device__ __forceinline__ void finish(float scale, float scale_log2, Output<C>& output) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[strip][half] = sum_of_row(sum[strip][half]);
        if constexpr (C::kPlain) {
          const float most = softmax_shift(max[strip][half]);
          const float correction = 1.0f / weight(most, rounded_product(most, scale_log2), scale_log2);
          sum[strip][half] *= correction;
#pragma unroll
          for (int tile = 0; tile < C::kDimTiles; ++tile) {
            output.at[strip][tile][2 * half] *= correction;
            output.at[strip][tile][2 * half + 1] *= correction;
          }
          max[strip][half] = rounded_product(max[strip][half], scale);
        }
      }
    }
  }
};

// Zeroes weights; the survivors' factor is that of the whole output, so that 16-bit weights keep their range.
template <class C>
__device__ __forceinline__ void drop_weights(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                             int first_key, Scores<C>& weights) {
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
    const StripDropout<Place<C>> dropout({plan, work, lane, first_key}, strip);
#pragma unroll
    for (int tile = 0; tile < C::kKeyTiles; ++tile) {
      const uint32_t kept = dropout.kept(tile);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (!(kept >> n & 1u)) weights.at[strip][tile][n] = 0.0f;
      }
    }
  }
}

}  // namespace selfattn::cuda::sm80
