// The weights themselves, from the forward's row statistics, by a block for each tile of rows and keys.
#pragma once

#include <algorithm>

#include "../common/grid.cuh"
#include "../mma/epilogue.cuh"
#include "tile_scores.cuh"

namespace selfattn::cuda::sm80 {

using mma::Place;
using mma::Plan;
using mma::RowOf;

// When they are written, the weights take the place of the tiles, which is too small for small dims.
template <class C>
constexpr int weights_shared_bytes() {
  return std::max(SharedLayout<C>::kTiles + C::kRows * C::kKeys * 4, SharedLayout<C>::kBytes);
}

template <class C>
class Weights : TileScores<C> {
  using Base = TileScores<C>;
  using Base::p_, Base::plan_, Base::scores_, Base::shared_, Base::work_;

 public:
  __device__ __forceinline__ Weights(const Plan& plan, int64_t block, unsigned char* memory)
      : Base(plan, block / plan.key_tiles, memory), tile_(static_cast<int>(block % plan.key_tiles)) {}

  __device__ __forceinline__ void run() {
    if (work_.rows <= 0) return;
    const int first_key = tile_ * C::kKeys;
    const bool visible = first_key < work_.end && first_key + C::kKeys > work_.begin &&
                         (!this->has_mask() || this->load_mask(tile_));
    if (visible) {
      this->start_queries();
      this->start_keys(tile_);
      ptx::copy_async_commit();
      this->compute_scores(first_key, this->wait_for_keys());
      weigh();
      if (p_.dropout.enabled) mma::drop_weights(Place<C>{{plan_, work_, this->lane()}, first_key}, scores_);
    } else {
      mma::clear(scores_.at);
    }
    __syncthreads();
    write(first_key);
  }

 private:
  // A hidden key has weight 0 in every row, even in one that holds NaN.
  __device__ __forceinline__ void weigh() {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = work_.statistic(p_, work_.row(this->lane().row(strip, half)));
        const float shift = softmax_shift(static_cast<const float*>(plan_.weights_outputs.row_max)[at]);
        const float sum = static_cast<const float*>(plan_.weights_outputs.row_sum)[at];
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores_.at[strip][tile][2 * half + i];
            s = s == -infinity<float>() || sum == 0.0f ? 0.0f : exponential(s - shift) / sum;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void write(int first_key) {
    float* rows = shared_.exchange();
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
          const float* s = &scores_.at[strip][tile][2 * half];
          *reinterpret_cast<float2*>(
              rows + mma::exchanged<C::kKeys>(this->lane().row(strip, half), this->lane().column(tile))) =
              float2{s[0] * plan_.dropout_scale, s[1] * plan_.dropout_scale};
        }
      }
    }
    __syncthreads();
    const int keys = min(work_.keys - first_key, C::kKeys);
    for (int r = this->lane().thread / kWarp; r < work_.rows; r += C::kThreads / kWarp) {
      const View& weights = plan_.weights_outputs.weights;
      const RowOf row = work_.row(r);
      const int64_t at = weights.offset(work_.batch, row.head, row.query) + first_key;
      for (int column = this->lane().lane * 2; column < keys; column += 2 * kWarp) {
        const float2 pair = *reinterpret_cast<const float2*>(rows + mma::exchanged<C::kKeys>(r, column));
        store_pair<C::kDType>(weights.data, at + column, pair.x, pair.y, column + 1 < keys, plan_.out_pairs);
      }
    }
  }

  int tile_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) weights_kernel(const Plan plan) {
  if constexpr (ptx::kForAmpere) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const int64_t block = block_of_grid();
    if (block < plan.blocks) Weights<C>(plan, block, memory).run();
  }
}

}  // namespace selfattn::cuda::sm80
