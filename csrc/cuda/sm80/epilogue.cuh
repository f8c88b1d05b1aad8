// From accumulators to results: warps that divided the keys are merged, rows are normalised and written.
#pragma once

#include "../common/overflow.cuh"
#include "../split/row_results.cuh"
#include "shared_layout.cuh"
#include "softmax.cuh"

namespace selfattn::cuda::sm80 {

// Halves of the warps that share rows merge pairwise, until the first has it all. The tiles in shared memory
// are no longer needed and make room.
template <class C>
__device__ __forceinline__ void merge_key_warps(const SharedMemory<C>& shared, const Lane<C>& lane,
                                                Softmax<C>& softmax, Output<C>& output) {
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
          at[32] = softmax.sum[strip][half];
          at[64] = softmax.rounded[strip][half];
          at += 96;
        }
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i, at += 32) *at = output.at[strip][tile][i];
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
          state.merge(RowState<float>{at[0], at[32]}, &factor[half], &other_factor[half]);
          softmax.max[strip][half] = state.max;
          softmax.sum[strip][half] = state.sum;
          float& rounding = softmax.rounded[strip][half];
          rounding = rounding * factor[half] + at[64] * other_factor[half];
          at += 96;
        }
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i, at += 32) {
            float& sum = output.at[strip][tile][i];
            sum = sum * factor[i / 2] + *at * other_factor[i / 2];
          }
        }
      }
    }
  }
}

// Normalised rows (or, of splits, the sums as they are) go through shared memory, where the tiles have been,
// so that a row is written by neighbouring lanes; each warp takes care of its own rows. Blocks of eight
// columns are exchanged by the row's number against bank conflicts, within the row.
template <int kColumns>
__device__ __forceinline__ int exchanged(int row, int column) {
  constexpr int kBlocks = kColumns % 32 == 0 ? 4 : 2;
  static_assert(kColumns % (8 * kBlocks) == 0, "blocks change places in pairs or fours");
  return row * kColumns + (column ^ (row & (kBlocks - 1)) << 3);
}

template <class C>
__device__ __forceinline__ void write_rows(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                           const SharedMemory<C>& shared, const Softmax<C>& softmax,
                                           const Output<C>& output) {
  const AttentionParams& p = plan.params;
  const bool partial = C::kFewQuery && work.splits > 1;
  float* rows = shared.exchange();
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane.row(strip, half);
      const RowOf row = work.row(r);
      const RowState<float> state{softmax.max[strip][half], softmax.sum[strip][half]};
      float factor = 1.0f;
      if (r < work.rows) {
        if (!partial) {
          factor = finish_row(plan, work.batch, row.head, work.statistic(p, row), state,
                              softmax.rounded[strip][half], lane.quad == 0);
        } else if (lane.quad == 0) {
          const int64_t at = plan.split_launch.state(p.heads, work.batch, row.head, row.query) + work.split;
          plan.split_launch.max[at] = state.max;
          plan.split_launch.sum[at] = state.sum;
          plan.split_launch.rounding[at] = softmax.rounded[strip][half];
        }
      }
#pragma unroll
      for (int tile = 0; tile < C::kDimTiles; ++tile) {
        const float x = output.at[strip][tile][2 * half], y = output.at[strip][tile][2 * half + 1];
        *reinterpret_cast<float2*>(rows + exchanged<C::kDim>(r, lane.dim(tile))) =
            float2{normalised(x, factor), normalised(y, factor)};
      }
    }
  }
  __syncwarp();
  const int end = min(lane.first_row + C::kWarpRows, work.rows);
#pragma unroll 1
  for (int r = lane.first_row; r < end; ++r) {
    const RowOf row = work.row(r);
    const int64_t at =
        partial
            ? (plan.split_launch.state(p.heads, work.batch, row.head, row.query) + work.split) * p.value_dim
            : work.offset(plan.outputs.out, row);
    bool finite = true;
#pragma unroll 1
    for (int column = lane.lane * 2; column < p.value_dim; column += 64) {
      const float2 pair = *reinterpret_cast<const float2*>(rows + exchanged<C::kDim>(r, column));
      const bool both = column + 1 < p.value_dim;
      if (partial) {
        plan.split_launch.out[at + column] = pair.x;
        if (both) plan.split_launch.out[at + column + 1] = pair.y;
      } else {
        finite = finite && is_finite_number(pair.x + pair.y);
        store_results<C::kDType>(plan, at + column, pair.x, pair.y, both);
      }
    }
    if constexpr (kMayOverflow<C::kDType>) {
      if (partial || __all_sync(kWholeWarp, finite)) continue;
      __syncwarp();
      mend_overflow<C::kDType>(p, plan.outputs, work.batch, row.head, row.query, 0, p.value_dim);
    }
  }
}

}  // namespace selfattn::cuda::sm80
