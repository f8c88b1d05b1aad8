// A backward call: numbers of the rows first, then one kernel for each side.
#include <algorithm>

#include "../../rows/rows.h"
#include "instances.h"

namespace selfattn::cuda::sm80::backward {

namespace {

// The padded dims that there are kernels for.
template <DType kDType>
auto sides_for(int64_t dim) {
  if constexpr (kDType == DType::kFloat32) {
    return dim <= 64 ? &run_sides<kDType, 64> : &run_sides<kDType, 128>;
  } else {
    return dim <= 64    ? &run_sides<kDType, 64>
           : dim <= 128 ? &run_sides<kDType, 128>
                        : &run_sides<kDType, 256>;
  }
}

}  // namespace

void run(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  const Statistics statistics = statistics_in(where.workspace, p);
  pad_statistics(p, statistics, p.dtype != DType::kFloat32 && is_plain(p, a), where);
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  const auto sides = p.dtype == DType::kBFloat16  ? sides_for<DType::kBFloat16>(dim)
                     : p.dtype == DType::kFloat16 ? sides_for<DType::kFloat16>(dim)
                                                  : sides_for<DType::kFloat32>(dim);
  sides(p, a, statistics, where.stream);
}

}  // namespace selfattn::cuda::sm80::backward
