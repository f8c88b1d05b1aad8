// The end of a row: its statistics, the factor of its output, and elements written two at a time. `Plan` is
// what a kernel was launched with: params, outputs, dropout_scale, out_pairs.
#pragma once

#include "../common/element.cuh"
#include "../common/row_state.cuh"

namespace selfattn::cuda {

// Two neighbouring elements, of which the second may not exist.
template <DType kDType, class T>
__device__ __forceinline__ void store_pair(void* tensor, int64_t at, T x, T y, bool both, bool vector) {
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
template <DType kDType, class Plan, class T>
__device__ __forceinline__ void store_results(const Plan& plan, int64_t at, T x, T y, bool both) {
  using E = Element<kDType>;
  store_pair<kDType>(plan.outputs.out.data, at, x, y, both, plan.out_pairs);
  if (plan.outputs.out_residual == nullptr) return;
  store_pair<kDType>(plan.outputs.out_residual, at, x - E::widen(E::narrow(x)), y - E::widen(E::narrow(y)),
                     both, plan.out_pairs);
}

// The sink, a score without a value, joins at the end. `rounding` is what the sum of the weights as they were
// multiplied with the values has more than that of the state. Returns the factor of the row's output, 0 for a
// row that saw nothing. One of the lanes that share the row writes its statistics.
template <class Plan, class T>
__device__ __forceinline__ T finish_row(const Plan& plan, int64_t batch, int64_t head, int64_t row,
                                        RowState<T> state, T rounding, bool writes) {
  const AttentionParams& p = plan.params;
  T factor = T(1), ignored;
  if (p.sinks.data != nullptr) {
    state.merge(RowState<T>::of_sink(head_scalar<T>(p.sinks, batch, head)), &factor, &ignored);
  }
  if (writes) {
    static_cast<T*>(plan.outputs.row_max)[row] = state.max;
    static_cast<T*>(plan.outputs.row_sum)[row] = state.sum;
  }
  if (state.sum == T(0)) return T(0);
  return factor / (state.sum + rounding * factor) * plan.dropout_scale;
}

}  // namespace selfattn::cuda
