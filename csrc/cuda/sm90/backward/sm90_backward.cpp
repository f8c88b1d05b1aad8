#include "sm90_backward.h"

#include <algorithm>

#include "../sm90_plan.h"
#include "sm90_backward_plan.h"

namespace selfattn::cuda::sm90::backward {

namespace {

template <DType kDType>
mma::backward::Sides instance_for(int64_t dim, int64_t value_dim) {
  const int64_t larger = std::max(dim, value_dim);
  if (larger <= 64) return &run_sides<kDType, 64, 64>;
  if (larger <= 96) return &run_sides<kDType, 96, 96>;
  if (larger <= 128) return &run_sides<kDType, 128, 128>;
  if (larger <= 192 && value_dim <= 128) return &run_sides<kDType, 192, 128>;
  if (larger <= 192) return &run_sides<kDType, 192, 192>;
  return &run_sides<kDType, 256, 256>;
}

}  // namespace

bool takes(const AttentionParams& p, const BackwardArguments& a) {
  const bool options_fit = p.head_dim <= kMostDimWithOptions && p.value_dim <= kMostValueDimWithOptions;
  return (options_fit || mma::backward::is_bare(p, a)) && p.queries > 0 &&
         is_mappable(a.grad_out, p.queries, p.value_dim);
}

void run(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
         CUstream_st* stream) {
  const auto sides = p.dtype == DType::kBFloat16 ? instance_for<DType::kBFloat16>(p.head_dim, p.value_dim)
                                                 : instance_for<DType::kFloat16>(p.head_dim, p.value_dim);
  sides(p, a, statistics, stream);
}

}  // namespace selfattn::cuda::sm90::backward
