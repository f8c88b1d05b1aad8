// Numbers of single rows that every backward needs, and the kernels that compute them.
//
// prepare() runs before the kernels that compute tiles, and sum_of_rows() after them.
#pragma once

#include "../../core/attention_params.h"
#include "../common/launch.h"

namespace selfattn::cuda::rows {

// Numbers of every row, in arrays of the accumulation type on the device with the layout of the forward's row
// statistics.
template <class T>
struct RowGradients {
  T* shift;        // subtracted from a score before exp: the row's maximum, 0 if the row saw nothing
  T* inverse_sum;  // the factor from that exponential to a weight: 0 if the row saw nothing
  T* delta;        // rowsum(grad_out * out) + grad_row
};

// The bytes of one such array, a multiple of 256, and of all three.
size_t row_array_bytes(const AttentionParams& params);
size_t row_gradients_bytes(const AttentionParams& params);

template <class T>
RowGradients<T> row_gradients_in(void* memory, const AttentionParams& params);

// Fills the arrays, and BackwardArguments::grad_sinks_rows if there are sinks. `memory` has
// row_gradients_bytes().
void prepare(const AttentionParams& params, const BackwardArguments& arguments, void* memory,
             const Launch& where);

// Sums grad_slopes_rows or grad_sinks_rows over the queries, and over the batch if it shared the coefficient.
// The result is (batch or 1, heads). The sums are float64 and have a fixed order.
void sum_of_rows(const AttentionParams& params, const void* rows, void* sums, bool shared_by_batch,
                 const Launch& where);

}  // namespace selfattn::cuda::rows
