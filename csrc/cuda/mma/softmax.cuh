// Online softmax of the rows that a lane shares with three others (Milakov and Gimelshein 2018).
#pragma once

#include "../common/row_state.cuh"
#include "dropout_bits.cuh"
#include "paired_weights.cuh"
#include "score_options.cuh"

namespace selfattn::cuda::mma {

// Softmax keeps the numbers of rows between its steps in this place. A kernel whose registers do not hold
// them names another one, with kParks and parked(thread, strip, number).
struct InRegisters {
  static constexpr bool kParks = false;
};

template <class C, class Storage = InRegisters>
struct Softmax {
  float max[C::kStrips][2];  // the row's; the bare path keeps it unscaled until finish()
  float sum[C::kStrips][2];  // until finish() that of the lane's own columns
  // 16-bit types: the sum of the weights as they are rounded for the product with values. Outputs are divided
  // by it: otherwise what the values of a row have in common, such as an offset, would carry that rounding
  // into the output, and by way of delta into all gradients. From finish() on it is the difference to sum.
  float rounded[C::kStrips][2];

  __device__ __forceinline__ void reset(const Storage& storage = {}) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      max[strip][0] = max[strip][1] = -infinity<float>();
      sum[strip][0] = sum[strip][1] = 0.0f;
      rounded[strip][0] = rounded[strip][1] = 0.0f;
      park(storage, strip);
    }
  }

  // If the storage parks, the numbers of a strip leave registers and come back.
  __device__ __forceinline__ void park(const Storage& storage, int strip) const {
    park(storage, strip, 0, sum);
    park(storage, strip, 1, max);
    park(storage, strip, 2, rounded);
  }
  __device__ __forceinline__ void take(const Storage& storage, int strip) {
    take(storage, strip, 0, sum);
    take(storage, strip, 1, max);
    take(storage, strip, 2, rounded);
  }

  // exp(score - max). On the bare path scale and log2(e) are one factor and the difference is one
  // multiply-add. Elsewhere the difference comes first: it is exact near the maximum, where float32 needs
  // that, and a row that is hidden softly, by the least finite number, must not overflow.
  static __device__ __forceinline__ float weight(float score, float shift, float scale_log2) {
    if constexpr (C::kBare) return ptx::exp2_approx(fmaf(score, scale_log2, -shift));
    return quick_exp(score - shift);
  }

  // Turns scores into weights and brings sums down to the new maximum; scale_output(strip, half, factor) does
  // so with the output. The maxima of all rows come first, so that their shuffles wait for each other once.
  template <class ScaleOutput>
  __device__ __forceinline__ void step(float scale_log2, Scores<C>& scores, const ScaleOutput& scale_output,
                                       const Storage& storage = {}) {
    float most[C::kStrips][2];
    find_maxima(storage, scores, most);
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      take(storage, strip);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = C::kBare ? rounded_product(softmax_shift(most[strip][half]), scale_log2)
                                     : softmax_shift(most[strip][half]);
        const float rescale = weight(max[strip][half], shift, scale_log2);
        max[strip][half] = most[strip][half];
        // In float32 each tile has a sum of its own: added to a large weight, each small one would be
        // rounded.
        const float others = sum[strip][half] * rescale;
        float total = C::kFloat32 ? 0.0f : others;
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores.at[strip][tile][2 * half + i];
            s = weight(s, shift, scale_log2);
            total += s;
          }
        }
        sum[strip][half] = C::kFloat32 ? others + total : total;
        if constexpr (!C::kFloat32) rounded[strip][half] *= rescale;
        scale_output(strip, half, rescale);
      }
      park(storage, strip);
    }
  }

  // Adds to `rounded` by a product of the weights with ones, which gives the whole sum to every lane of a
  // row. So its bits are cut off like those of the output's sums, which are divided by it.
  __device__ __forceinline__ void add_rounded(const PairedWeights<C>& paired, const Storage& storage = {}) {
    using Arithmetic = mma::Arithmetic<C::kDType>;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      take(storage, strip, 2, rounded);
      float sums[4] = {rounded[strip][0], rounded[strip][0], rounded[strip][1], rounded[strip][1]};
#pragma unroll
      for (int n = 0; n < C::kColumnTiles / 2; ++n) {
        Arithmetic::multiply(sums, paired.block[n][0][strip], Arithmetic::kOnes, Arithmetic::kOnes);
      }
      rounded[strip][0] = sums[0];
      rounded[strip][1] = sums[2];
      park(storage, strip, 2, rounded);
    }
  }

  // The bare path subtracts the rounded product of maximum and scale from exact ones. Here sums and output
  // become those of the exact maximum; otherwise sums of large scores would be off by that rounding. Where it
  // exceeds a float's exponent, write_large_rows() computes the row anew.
  __device__ __forceinline__ void finish(float scale, float scale_log2, Output<C>& output,
                                         const Storage& storage = {}) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      take(storage, strip);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[strip][half] = sum_of_row(sum[strip][half]);
        if constexpr (!C::kFloat32) rounded[strip][half] -= sum[strip][half];
        if constexpr (C::kBare) {
          const float most = softmax_shift(max[strip][half]);
          const float correction = 1.0f / weight(most, rounded_product(most, scale_log2), scale_log2);
          sum[strip][half] *= correction;
          rounded[strip][half] *= correction;
          scale_row(output.at, strip, half, correction);
          max[strip][half] = rounded_product(max[strip][half], scale);
        }
      }
    }
  }

 private:
  // The maxima of the scores and those before them. Collective.
  __device__ __forceinline__ void find_maxima(const Storage& storage, const Scores<C>& scores,
                                              float (&most)[C::kStrips][2]) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      take(storage, strip, 1, max);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[strip][half] = max[strip][half];
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
          const float* s = &scores.at[strip][tile][2 * half];
          most[strip][half] = larger(most[strip][half], larger(s[0], s[1]));
        }
      }
    }
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance) {
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& row = most[strip][half];
          row = larger(row, __shfl_xor_sync(kWholeWarp, row, distance));
        }
      }
    }
  }

  static __device__ __forceinline__ void park(const Storage& storage, int strip, int number,
                                              const float (&numbers)[C::kStrips][2]) {
    if constexpr (Storage::kParks) {
      storage.parked(Lane<C>().thread, strip, number) = float2{numbers[strip][0], numbers[strip][1]};
    }
  }
  static __device__ __forceinline__ void take(const Storage& storage, int strip, int number,
                                              float (&numbers)[C::kStrips][2]) {
    if constexpr (Storage::kParks) {
      const float2 parked = storage.parked(Lane<C>().thread, strip, number);
      numbers[strip][0] = parked.x;
      numbers[strip][1] = parked.y;
    }
  }
};

// Calls zero(strip, half, tile, i) for each weight that dropout drops. The factor of the others is applied to
// the whole output, so that 16-bit weights keep their range.
template <class C, class Zero>
__device__ __forceinline__ void for_each_dropped(const Place<C>& at, const Zero& zero) {
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
    const StripDropout<Place<C>> dropout(at, strip);
#pragma unroll
    for (int tile = 0; tile < C::kColumnTiles; ++tile) {
      const uint32_t kept = dropout.kept(tile);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (!(kept >> n & 1u)) zero(strip, n / 2, tile, n % 2);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void drop_weights(const Place<C>& at, Scores<C>& weights) {
  for_each_dropped<C>(
      at, [&](int strip, int half, int tile, int i) { weights.at[strip][tile][2 * half + i] = 0.0f; });
}
template <class C>
__device__ __forceinline__ void drop_weights(const Place<C>& at, PairedWeights<C>& weights) {
  for_each_dropped<C>(at, [&](int strip, int half, int tile, int i) {
    weights.pair(strip, half, tile) &= i == 0 ? 0xffff0000u : 0x0000ffffu;
  });
}

}  // namespace selfattn::cuda::mma
