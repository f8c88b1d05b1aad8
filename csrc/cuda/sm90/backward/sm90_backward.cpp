// A backward call: what sm80 prepares and what it computes of masks, around the two sides.
#include <algorithm>

#include "../../sm80/backward/instances.h"
#include "instances.h"

namespace selfattn::cuda::sm90::backward {

namespace {

template <DType kDType>
sm80::backward::Sides instance_for(int64_t dim, int64_t value_dim) {
  const int64_t larger = std::max(dim, value_dim);
  if (larger <= 64) return &run_sides<kDType, 64, 64>;
  if (larger <= 96) return &run_sides<kDType, 96, 96>;
  if (larger <= 128) return &run_sides<kDType, 128, 128>;
  if (larger <= 192 && value_dim <= 128) return &run_sides<kDType, 192, 128>;
  if (larger <= 192) return &run_sides<kDType, 192, 192>;
  return &run_sides<kDType, 256, 256>;
}

}  // namespace

void run(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  const auto sides = p.dtype == DType::kBFloat16 ? instance_for<DType::kBFloat16>(p.head_dim, p.value_dim)
                                                 : instance_for<DType::kFloat16>(p.head_dim, p.value_dim);
  sm80::backward::run(p, a, sides, where);
}

}  // namespace selfattn::cuda::sm90::backward
