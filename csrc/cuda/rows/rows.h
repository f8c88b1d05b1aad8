// What every backward needs to know of single rows, before and after the tiles: kernels of their own, which
// all the others share.
#pragma once

#include "../../core/attention_params.h"
#include "../common/launch.h"

namespace selfattn::cuda::rows {

// Of every row, in arrays of the accumulation type on the device, laid out as the forward's row statistics.
template <class T>
struct RowGradients {
  T* shift;        // what to subtract from a score before exp: the row's maximum, 0 where it saw nothing
  T* inverse_sum;  // what to multiply that with for a weight: 0 where the row saw nothing
  T* delta;        // rowsum(grad_out * out) + grad_row
};

// Bytes of one such array, a multiple of 256, and of all three.
size_t row_array_bytes(const AttentionParams& params);
size_t row_gradients_bytes(const AttentionParams& params);

template <class T>
RowGradients<T> row_gradients_in(void* memory, const AttentionParams& params);

// Fills them, and BackwardArguments::grad_sinks_rows where there are sinks. `memory` has
// row_gradients_bytes().
void prepare(const AttentionParams& params, const BackwardArguments& arguments, void* memory,
             const Launch& where);

// What follows the tiles: grad_slopes_rows or grad_sinks_rows summed over the queries and, where the
// coefficient was shared by the batch, over that, into (batch or 1, heads). Float64 sums of fixed order.
void sum_of_rows(const AttentionParams& params, const void* rows, void* sums, bool shared_by_batch,
                 const Launch& where);

}  // namespace selfattn::cuda::rows
