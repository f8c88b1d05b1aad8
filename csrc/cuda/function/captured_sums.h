// The memory where gradients of captured tensors are summed up: the result, and copies of it.
//
// core/captured_parts.h says which block adds to which copy.
#pragma once

#include "../../core/attention_params.h"
#include "../common/launch.h"

namespace selfattn::cuda {

struct CapturedSums {
  // The most tensors that a compiled function reads: flex/cuda_source.py.
  static constexpr int kMostTensors = 85;
  static constexpr uint32_t kNowhere = 0xffffffffu;

  double* result;
  int64_t size;
  double* others;  // all copies but the first, which is the result
  int64_t copies;
  int64_t first[kMostTensors];  // where the gradient of each tensor begins; -1 where it is not wanted

  // `g` must have at most kMostTensors tensors, and a size below kNowhere.
  CapturedSums(const CapturedGradients& g, int64_t number_of_copies, void* memory)
      : result(g.sums), size(g.size()), others(static_cast<double*>(memory)), copies(number_of_copies) {
    int64_t next = 0;
    for (int64_t i = 0; i < g.count; next += g.sizes[i++]) first[i] = g.sizes[i] > 0 ? next : -1;
  }

  SELFATTN_HOST_DEVICE int64_t size_of_others() const { return (copies - 1) * size; }
  SELFATTN_HOST_DEVICE double* copy(int64_t number) const {
    return number == 0 ? result : others + (number - 1) * size;
  }
  // The place of an element of a tensor in a copy; kNowhere if the element is -1 (none) or has no gradient.
  SELFATTN_HOST_DEVICE uint32_t place(int tensor, int64_t element) const {
    const int64_t begin = first[tensor];
    return begin < 0 || element < 0 ? kNowhere : static_cast<uint32_t>(begin + element);
  }
};

// Fills all copies except the result with zeros.
void clear_copies(const CapturedSums& sums, const Launch& where);

// Adds the other copies to the result, in their order.
void join_copies(const CapturedSums& sums, const Launch& where);

}  // namespace selfattn::cuda
