// The plan of an sm90 backward launch: the common plan, and what the producer copies. Plain C++.
#pragma once

#include "../../mma/backward/backward_plan.h"
#include "../mapped_tensor.h"

namespace selfattn::cuda::sm90::backward {

// The tensors that the producer copies. qk and vo: see BackwardKind.
struct Copies {
  MappedTensor own_qk, own_vo, passing_qk, passing_vo;
};

struct Plan : Copies, mma::backward::Plan {};

// Above this dim, sums leave no registers for what options need.
constexpr int kMostValueDimWithOptions = 128;

// `rows`, `columns`: of a tile; `owns_queries`: see BackwardKind.
Plan plan_side(const AttentionParams& params, const BackwardArguments& arguments,
               const mma::backward::Statistics& statistics, int64_t rows, int64_t columns, bool owns_queries);

}  // namespace selfattn::cuda::sm90::backward
