// masked_softmax: scale, mask and softmax of given scores, and its gradient.
//
// A warp owns a row, because nothing is multiplied, and so nothing is shared. It reads the row twice, for the
// statistics and for the result.
#pragma once

#include "../common/element.cuh"
#include "../common/grid.cuh"
#include "../common/row_state.cuh"
#include "../common/score_tile.cuh"
#include "tile.cuh"

namespace selfattn::cuda::simt {

constexpr int kSoftmaxRows = kThreads / kWarp;  // of a block
constexpr int kKeysPerLane = 4;                 // at a time
constexpr int kKeysAtOnce = kWarp * kKeysPerLane;

template <class Params>
__device__ __forceinline__ HeadTile row_of_warp(const Params& p, int64_t first_block) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  return HeadTile((first_block + blockIdx.x) * kSoftmaxRows + warp, p.heads, p.queries, 1);
}

template <class Storage>
__device__ __forceinline__ Storage* row_of(const View& view, const HeadTile& at) {
  return static_cast<Storage*>(view.data) + view.offset(at.batch, at.head, at.first_row);
}

// Merges the states of all lanes. Every lane gets the result.
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

// The final scores of the lane's keys: first + lane, first + 32 + lane and so on. They are -inf beyond the
// last key.
template <DType kDType, class T>
__device__ __forceinline__ void scores_of_lane(ScoreTile<T>& tile,
                                               const typename Element<kDType>::Storage* row, int64_t first,
                                               int lane, T (&s)[kKeysPerLane]) {
  tile.move_to(first);
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const int column = i * kWarp + lane;
    const bool inside = column < tile.columns();
    s[i] = inside ? tile.score(0, column, Element<kDType>::widen(row[first + column])) : -infinity<T>();
  }
}

// `p` holds the options of the scores: scale, mask and window.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, 4)
    masked_softmax_kernel(const AttentionParams p, const View scores, const View result,
                          const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  using Storage = typename Element<kDType>::Storage;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const HeadTile at = row_of_warp(p, first_block);
  if (at.batch >= p.batch) return;

  const Storage* const from = row_of<Storage>(scores, at);
  Storage* const to = row_of<Storage>(result, at);
  ScoreTile<T> tile(p, sequence_of(p, at.batch), at.head, at.first_row);

  T s[kKeysPerLane];
  RowState<T> state;
#pragma unroll 1
  for (int64_t first = 0; first < p.keys; first += kKeysAtOnce) {
    scores_of_lane<kDType>(tile, from, first, lane, s);
    T most = s[0];
#pragma unroll
    for (int i = 1; i < kKeysPerLane; ++i) most = larger(most, s[i]);
    T sum = state.sum * state.raise_max(most);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) sum += exponential(s[i] - state.shift());
    state.sum = sum;
  }
  state = merge_lanes(state);

  const T inverse = state.inverse_sum();
#pragma unroll 1
  for (int64_t first = 0; first < p.keys; first += kKeysAtOnce) {
    scores_of_lane<kDType>(tile, from, first, lane, s);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int column = i * kWarp + lane;
      if (column < tile.columns()) to[first + column] = Element<kDType>::narrow(state.weight(s[i], inverse));
    }
  }
}

template <DType kDType>
void masked_softmax(const SoftmaxParams& s, const Launch& where) {
  const AttentionParams p = attention_of(s);
  const int64_t blocks = divide_up(p.batch * p.heads * p.queries, kSoftmaxRows);
  launch_blocks(&masked_softmax_kernel<kDType>, blocks, kThreads, 0, where, p, s.scores, s.result);
}

// Calls body(i, key) for the lane's keys; i counts those of one step.
template <class Body>
__device__ __forceinline__ void for_each_key_of_lane(int64_t keys, int lane, const Body& body) {
#pragma unroll 1
  for (int64_t first = lane; first < keys; first += kKeysAtOnce) {
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int64_t key = first + i * kWarp;
      if (key < keys) body(i, key);
    }
  }
}

// dS = scale · P (dP - Σ P dP). A weight of 0 belongs to a hidden key, whose gradient must not matter even if
// it is NaN.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, 4)
    masked_softmax_gradient_kernel(const SoftmaxParams p, const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  using Storage = typename Element<kDType>::Storage;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const HeadTile at = row_of_warp(p, first_block);
  if (at.batch >= p.batch) return;

  const Storage* const weights = row_of<Storage>(p.scores, at);
  const Storage* const grads = row_of<Storage>(p.grad, at);
  Storage* const to = row_of<Storage>(p.result, at);

  T sums[kKeysPerLane] = {};
  for_each_key_of_lane(p.keys, lane, [&](int i, int64_t key) {
    const T weight = Element<kDType>::widen(weights[key]), grad = Element<kDType>::widen(grads[key]);
    if (weight != T(0)) sums[i] = multiply_add(weight, grad, sums[i]);
  });
  T sum = T(0);
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) sum += sums[i];
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);

  const T scale = static_cast<T>(p.scale);
  for_each_key_of_lane(p.keys, lane, [&](int, int64_t key) {
    const T weight = Element<kDType>::widen(weights[key]), grad = Element<kDType>::widen(grads[key]);
    to[key] = Element<kDType>::narrow(weight != T(0) ? scale * (weight * (grad - sum)) : T(0));
  });
}

template <DType kDType>
void masked_softmax_backward(const SoftmaxParams& p, const Launch& where) {
  const int64_t blocks = divide_up(p.batch * p.heads * p.queries, kSoftmaxRows);
  launch_blocks(&masked_softmax_gradient_kernel<kDType>, blocks, kThreads, 0, where, p);
}

}  // namespace selfattn::cuda::simt
