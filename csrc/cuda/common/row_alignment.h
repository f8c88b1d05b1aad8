// Whether the rows of a tensor are aligned for reading or writing several elements at once. Plain C++.
#pragma once

#include <cstdint>

#include "../../core/attention_params.h"

namespace selfattn::cuda {

// Whether every row of a view starts at a multiple of `bytes`. Strides of dimensions with one element are
// never used, but to make an exception for them is not worth the code.
inline bool rows_start_at_multiples(const View& view, int64_t bytes) {
  bool all = reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0;
  for (int d = 0; d < 3; ++d) all = all && view.stride[d] * size_of(view.dtype) % bytes == 0;
  return all;
}

// Whether results of a forward can be written two elements at a time.
inline bool writable_by_pairs(const AttentionParams& p, const ForwardOutputs& outputs) {
  const int64_t pair = 2 * size_of(p.dtype);
  View residual = outputs.out;
  residual.data = outputs.out_residual;
  return p.value_dim % 2 == 0 && rows_start_at_multiples(outputs.out, pair) &&
         rows_start_at_multiples(residual, pair);
}

}  // namespace selfattn::cuda
