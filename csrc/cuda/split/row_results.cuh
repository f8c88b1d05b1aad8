// Writes the results of a row: its statistics, and its output two elements at a time.
//
// `Plan` is the parameter of a kernel: it has params, outputs, dropout_scale and out_pairs.
#pragma once

#include "../common/element.cuh"
#include "../common/row_state.cuh"

namespace selfattn::cuda {

// Stores two neighbouring elements; the second need not exist.
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

// Stores two results, and their rounding errors.
template <DType kDType, class Plan, class T>
__device__ __forceinline__ void store_results(const Plan& plan, int64_t at, T x, T y, bool both) {
  using E = Element<kDType>;
  store_pair<kDType>(plan.outputs.out.data, at, x, y, both, plan.out_pairs);
  if (plan.outputs.out_residual == nullptr) return;
  store_pair<kDType>(plan.outputs.out_residual, at, x - E::widen(E::narrow(x)), y - E::widen(E::narrow(y)),
                     both, plan.out_pairs);
}

// Adds the sink, a score without a value, to the row's state. `rounding` is by how much the sum of the
// rounded weights, which were multiplied with the values, exceeds state.sum. Returns the factor of the row's
// output, 0 for a row that saw nothing. Of the lanes that share the row, one writes its statistics.
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
