// From accumulators to results: warps that divided the keys are merged, rows are normalised and written.
#pragma once

#include "../common/element.cuh"
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

// Two neighbouring elements, of which the second may not exist.
template <DType kDType>
__device__ __forceinline__ void store_pair(void* tensor, int64_t at, float x, float y, bool both,
                                           bool vector) {
  using E = Element<kDType>;
  using Storage = typename E::Storage;
  struct __align__(2 * sizeof(Storage)) Pair {
    Storage x, y;
  };
  Storage* to = static_cast<Storage*>(tensor) + at;
  if (vector) {
    *reinterpret_cast<Pair*>(to) = Pair{E::narrow(x), E::narrow(y)};
  } else {
    to[0] = E::narrow(x);
    if (both) to[1] = E::narrow(y);
  }
}

// Results, and what their rounding took away.
template <DType kDType>
__device__ __forceinline__ void store_results(const Plan& plan, int64_t at, float x, float y, bool both) {
  using E = Element<kDType>;
  store_pair<kDType>(plan.outputs.out.data, at, x, y, both, plan.out_pairs);
  if (plan.outputs.out_residual == nullptr) return;
  store_pair<kDType>(plan.outputs.out_residual, at, x - E::widen(E::narrow(x)), y - E::widen(E::narrow(y)),
                     both, plan.out_pairs);
}

// The sink, a score without a value, joins at the end. `rounding`: see Softmax. Returns the factor of the
// row's output, 0 for a row that saw nothing. One of the lanes that share the row writes its statistics.
__device__ __forceinline__ float finish_row(const Plan& plan, int64_t batch, int64_t head, int64_t row,
                                            RowState<float> state, float rounding, bool writes) {
  const AttentionParams& p = plan.params;
  float factor = 1.0f, ignored;
  if (p.sinks.data != nullptr) {
    state.merge(RowState<float>::of_sink(head_scalar(p.sinks, batch, head)), &factor, &ignored);
  }
  if (writes) {
    static_cast<float*>(plan.outputs.row_max)[row] = state.max;
    static_cast<float*>(plan.outputs.row_sum)[row] = state.sum;
  }
  if (state.sum == 0.0f) return 0.0f;
  return factor / (state.sum + rounding * factor) * plan.dropout_scale;
}

// Where the states of a row's splits lie.
__device__ __forceinline__ int64_t partial_state(const Plan& plan, int64_t batch, int64_t head,
                                                 int64_t query) {
  const int64_t row = (batch - plan.first_batch) * plan.params.heads + head;
  return (row * plan.partial_queries + query) * plan.splits;
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
  const bool partial = C::kThin && work.splits > 1;
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
          const int64_t at = partial_state(plan, work.batch, row.head, row.query) + work.split;
          plan.partial_max[at] = state.max;
          plan.partial_sum[at] = state.sum;
          plan.partial_rounding[at] = softmax.rounded[strip][half];
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
    const int64_t at = partial
                           ? (partial_state(plan, work.batch, row.head, row.query) + work.split) * p.value_dim
                           : work.offset(plan.outputs.out, row);
#pragma unroll 1
    for (int column = lane.lane * 2; column < p.value_dim; column += 64) {
      const float2 pair = *reinterpret_cast<const float2*>(rows + exchanged<C::kDim>(r, column));
      const bool both = column + 1 < p.value_dim;
      if (partial) {
        plan.partial_out[at + column] = pair.x;
        if (both) plan.partial_out[at + column + 1] = pair.y;
      } else {
        store_results<C::kDType>(plan, at + column, pair.x, pair.y, both);
      }
    }
  }
}

}  // namespace selfattn::cuda::sm80
