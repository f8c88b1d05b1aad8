// How many pieces of a size it takes: plain C++, for plans as for kernels.
#pragma once

#include <cstdint>

#include "../../core/dtype.h"

namespace selfattn::cuda {

SELFATTN_HOST_DEVICE inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace selfattn::cuda
