// What one launch of a backward kernel of sm90 is told. Plain C++, filled on the host.
#pragma once

#include "../../sm80/backward/plan.h"
#include "../mapped_tensor.h"

namespace selfattn::cuda::sm90::backward {

// `first` and `second`: see Side in sm80/backward/config.cuh.
struct Plan {
  MappedTensor own_first, own_second, passing_first, passing_second;
  sm80::backward::Plan plan;
};

// Above them, sums leave no registers for what options need.
constexpr int kMostDimWithOptions = 192, kMostValueDimWithOptions = 128;

// Whether these kernels compute the gradients of a call that the forward's take: otherwise sm80 does.
bool takes(const AttentionParams& params, const BackwardArguments& arguments);

// `rows`, `columns`: of a tile; `owns_queries`: see Config.
Plan plan_side(const AttentionParams& params, const BackwardArguments& arguments,
               const sm80::backward::Statistics& statistics, int64_t rows, int64_t columns,
               bool owns_queries);

}  // namespace selfattn::cuda::sm90::backward
