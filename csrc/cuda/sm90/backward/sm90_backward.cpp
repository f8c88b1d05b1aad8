// A backward call: what sm80 prepares and what it computes of masks, around the two sides.
#include <algorithm>

#include "../../sm80/backward/instances.h"
#include "instances.h"

namespace selfattn::cuda::sm90::backward {

namespace {

template <DType kDType>
sm80::backward::Sides instance_for(int64_t dim) {
  return dim <= 64 ? &run_sides<kDType, 64> : &run_sides<kDType, 128>;
}

}  // namespace

void run(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  const bool bfloat16 = p.dtype == DType::kBFloat16;
  const auto sides = bfloat16 ? instance_for<DType::kBFloat16>(dim) : instance_for<DType::kFloat16>(dim);
  sm80::backward::run(p, a, sides, where);
}

}  // namespace selfattn::cuda::sm90::backward
