// The kernel that computes RowGradients: the normalisation of each row, and its delta.
//
//   delta = rowsum(grad_out * out) + grad_row
//
// The gradient of softmax subtracts delta from the gradient of every weight of the row. A warp owns a row and
// reads both tensors once, which takes nearly all of its time.
#pragma once

#include "../common/element.cuh"
#include "../common/grid.cuh"
#include "../common/row_state.cuh"
#include "../common/score_tile.cuh"
#include "../common/sequence.cuh"
#include "rows_of_dtype.h"

namespace selfattn::cuda::rows {

constexpr int kThreads = 128;
constexpr int kRowsOfBlock = kThreads / kWarp;

// Elements that a lane reads at once: 16 bytes of the accumulation type.
template <DType kDType>
constexpr int kAtOnce = 16 / static_cast<int>(sizeof(typename Element<kDType>::Accumulation));

template <DType kDType>
struct alignas(sizeof(typename Element<kDType>::Storage) * kAtOnce<kDType>) Several {
  typename Element<kDType>::Storage element[kAtOnce<kDType>];
};

// One row of a tensor; null stands for zeros.
template <DType kDType>
struct Row {
  using T = typename Element<kDType>::Accumulation;
  using Storage = typename Element<kDType>::Storage;

  const Storage* data;

  __device__ __forceinline__ Row(const View& view, int64_t batch, int64_t head, int64_t row)
      : data(view.data == nullptr ? nullptr
                                  : static_cast<const Storage*>(view.data) + view.offset(batch, head, row)) {}

  __device__ __forceinline__ bool aligned() const {
    return reinterpret_cast<uint64_t>(data) % sizeof(Several<kDType>) == 0;
  }

  // Elements first .. first + count - 1, zeros up to kAtOnce.
  __device__ __forceinline__ void load(int64_t first, int64_t count, bool at_once,
                                       T (&x)[kAtOnce<kDType>]) const {
    if (data != nullptr && at_once && count >= kAtOnce<kDType>) {
      const Several<kDType> stored = *reinterpret_cast<const Several<kDType>*>(data + first);
#pragma unroll
      for (int i = 0; i < kAtOnce<kDType>; ++i) x[i] = Element<kDType>::widen(stored.element[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce<kDType>; ++i) {
        x[i] = data != nullptr && i < count ? Element<kDType>::widen(data[first + i]) : T(0);
      }
    }
  }
};

// The lane's share of rowsum(grad_out * (out + residual)).
template <DType kDType>
__device__ __forceinline__ typename Element<kDType>::Accumulation share_of_product(
    const Row<kDType>& grad, const Row<kDType>& out, const Row<kDType>& residual, int lane, int64_t columns) {
  using T = typename Element<kDType>::Accumulation;
  constexpr int kStep = kAtOnce<kDType>;
  const bool at_once = grad.aligned() && out.aligned() && residual.aligned();
  T sum = T(0);
#pragma unroll 1
  for (int64_t first = lane * kStep; first < columns; first += kWarp * kStep) {
    T g[kStep], o[kStep], rest[kStep];
    grad.load(first, columns - first, at_once, g);
    out.load(first, columns - first, at_once, o);
    residual.load(first, columns - first, at_once, rest);
#pragma unroll
    for (int i = 0; i < kStep; ++i) sum = multiply_add(g[i], o[i] + rest[i], sum);
  }
  return sum;
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 8)
    row_gradients_kernel(const AttentionParams p, const BackwardArguments a,
                         const RowGradients<typename Element<kDType>::Accumulation> rows,
                         const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t index = (first_block + blockIdx.x) * kRowsOfBlock + static_cast<int>(threadIdx.x) / kWarp;
  if (index >= p.batch * p.heads * p.queries) return;
  const int64_t query_of_sequence = index % p.queries, head_index = index / p.queries;
  const int64_t head = head_index % p.heads, batch = head_index / p.heads;
  const Sequence sequence = sequence_of(p, batch);
  if (query_of_sequence >= sequence.queries) return;
  const int64_t query = sequence.first_query + query_of_sequence;
  const int64_t row = p.row(sequence.query_batch, head, query);

  T delta = share_of_product<kDType>(Row<kDType>(a.grad_out, sequence.query_batch, head, query),
                                     Row<kDType>(a.out, sequence.query_batch, head, query),
                                     Row<kDType>(a.out_residual, sequence.query_batch, head, query), lane,
                                     p.value_dim);
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(kWholeWarp, delta, lanes);
  if (lane != 0) return;

  if (a.grad_row != nullptr) delta += static_cast<const T*>(a.grad_row)[row];
  const RowState<T> state{static_cast<const T*>(a.row_max)[row], static_cast<const T*>(a.row_sum)[row]};
  const T inverse = state.inverse_sum();
  rows.shift[row] = state.shift();
  rows.inverse_sum[row] = inverse;
  rows.delta[row] = delta;
  if (a.grad_sinks_rows != nullptr) {
    // A sink is a score of the row without a value: the gradient of its weight is 0.
    const T weight = state.weight(head_scalar<T>(p.sinks, batch, head), inverse);
    const T own = a.grad_sink != nullptr ? static_cast<const T*>(a.grad_sink)[row] : T(0);
    static_cast<T*>(a.grad_sinks_rows)[row] = weight == T(0) ? T(0) : weight * (own - delta);
  }
}

template <DType kDType>
void prepare_of_dtype(const AttentionParams& p, const BackwardArguments& a, void* memory,
                      const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const int64_t blocks = divide_up(p.batch * p.heads * p.queries, kRowsOfBlock);
  launch_blocks(&row_gradients_kernel<kDType>, blocks, kThreads, 0, where, p, a,
                row_gradients_in<T>(memory, p));
}

}  // namespace selfattn::cuda::rows
