// Division that rounds up: plain C++, for plans as for kernels.
#pragma once

#include <type_traits>

#include "../../core/dtype.h"

namespace selfattn::cuda {

// How many parts of `by` it takes to hold n. The type is that of n.
template <class Integer>
SELFATTN_HOST_DEVICE constexpr Integer divide_up(Integer n, std::common_type_t<Integer> by) {
  return (n + by - 1) / by;
}

// The next multiple.
template <class Integer>
SELFATTN_HOST_DEVICE constexpr Integer round_up(Integer n, std::common_type_t<Integer> to) {
  return divide_up(n, to) * to;
}

}  // namespace selfattn::cuda
