// Online softmax of a row: the largest score so far, and the sum of exp(score - max).
//
// A row that has seen nothing is (-inf, 0).
#pragma once

#include "elementary.cuh"

namespace selfattn::cuda {

// The number to subtract from scores before exp: the maximum, or 0 if that is -inf, because -inf - -inf is
// NaN.
template <class T>
__device__ __forceinline__ T softmax_shift(T max) {
  return max == -infinity<T>() ? T(0) : max;
}

template <class T>
struct RowState {
  T max = -infinity<T>();
  T sum = T(0);

  // A sink has a score and no value; a sink of -inf counts as none.
  static __device__ __forceinline__ RowState of_sink(T sink) {
    RowState state;
    state.max = sink;
    state.sum = sink == -infinity<T>() ? T(0) : exponential(sink - sink);
    return state;
  }

  __device__ __forceinline__ T shift() const { return softmax_shift(max); }

  // Raises the largest score so far to at least `other`. Returns the factor by which everything summed up
  // before must be multiplied; the caller multiplies `sum`, too, when it adds to it. NaN never becomes a
  // maximum: it reaches the sum by exp.
  __device__ __forceinline__ T raise_max(T other) {
    const T before = max;
    max = larger(max, other);
    return exponential(before - shift());
  }

  // Joins the state of other keys of the row. Sums that were weighed by either state must then be multiplied
  // by its factor.
  __device__ __forceinline__ void merge(const RowState& other, T* factor, T* other_factor) {
    *factor = raise_max(other.max);
    *other_factor = exponential(other.max - shift());
    // Both products are rounded, so that it makes no difference which of the two states joins the other.
    sum = rounded_product(sum, *factor) + rounded_product(other.sum, *other_factor);
  }

  // The final factor of weights and outputs; 0 for a row that saw nothing.
  __device__ __forceinline__ T inverse_sum() const { return sum == T(0) ? T(0) : T(1) / sum; }

  // The weight of a score of the row. It is 0 for a hidden score, even if the row's sum is NaN.
  __device__ __forceinline__ T weight(T score, T inverse_sum) const {
    return score == -infinity<T>() ? T(0) : exponential(score - shift()) * inverse_sum;
  }
};

// A weighted sum, normalised: exactly 0 for a row that saw nothing, whatever its values hold.
template <class T>
__device__ __forceinline__ T normalised(T weighted_sum, T inverse_sum) {
  return inverse_sum == T(0) ? T(0) : weighted_sum * inverse_sum;
}

}  // namespace selfattn::cuda
