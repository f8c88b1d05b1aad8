// masked_softmax: scale, mask and softmax of given scores. A warp owns a row: there is nothing to multiply,
// and so nothing to share. It reads the row twice, for the statistics and for the weights.
#pragma once

#include "../common/element.cuh"
#include "../common/row_state.cuh"
#include "../common/score_tile.cuh"
#include "grid.cuh"
#include "tile.cuh"

namespace selfattn::cuda::simt {

constexpr int kSoftmaxRows = kThreads / kWarp;  // of a block

// One state from those of the lanes, in all lanes.
template <class T>
__device__ __forceinline__ RowState<T> merge_lanes(RowState<T> state) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    RowState<T> other;
    other.max = __shfl_xor_sync(kWholeWarp, state.max, lanes);
    other.sum = __shfl_xor_sync(kWholeWarp, state.sum, lanes);
    T factor, other_factor;
    state.merge(other, &factor, &other_factor);
  }
  return state;
}

// `p` holds the options of the scores: scale, mask and window.
template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    masked_softmax_kernel(const AttentionParams p, const View scores, const View result,
                          const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  using Storage = typename Element<kDType>::Storage;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const HeadTile at((first_block + blockIdx.x) * kSoftmaxRows + static_cast<int>(threadIdx.x) / kWarp,
                    p.heads, p.queries, 1);
  if (at.batch >= p.batch) return;

  const Storage* const from =
      static_cast<const Storage*>(scores.data) + scores.offset(at.batch, at.head, at.first_row);
  Storage* const to = static_cast<Storage*>(result.data) + result.offset(at.batch, at.head, at.first_row);
  ScoreTile<T> tile(p, at.batch, at.head, at.first_row);

  RowState<T> state;
  for (int64_t key = lane; key < p.keys; key += kWarp) {
    tile.move_to(key);
    const T score = tile.score(0, 0, Element<kDType>::widen(from[key]));
    const T factor = state.raise_max(score);
    state.sum = multiply_add(state.sum, factor, exponential(score - state.shift()));
  }
  state = merge_lanes(state);
  const T inverse = state.inverse_sum();
  for (int64_t key = lane; key < p.keys; key += kWarp) {
    tile.move_to(key);
    const T score = tile.score(0, 0, Element<kDType>::widen(from[key]));
    to[key] = Element<kDType>::narrow(state.weight(score, inverse));
  }
}

template <DType kDType>
void masked_softmax(const SoftmaxParams& s, const Launch& where) {
  AttentionParams p;
  p.batch = s.batch;
  p.heads = s.heads;
  p.queries = s.queries;
  p.keys = s.keys;
  p.dtype = s.dtype;
  p.scale = s.scale;
  p.mask = s.mask;
  p.window_right = s.window_right;
  p.query_offset = s.query_offset;
  const int64_t blocks = divide_up(p.batch * p.heads * p.queries, kSoftmaxRows);
  launch_blocks(&masked_softmax_kernel<kDType>, blocks, kThreads, 0, where, p, s.scores, s.result);
}

}  // namespace selfattn::cuda::simt
