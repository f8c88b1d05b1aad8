// A backward call: numbers of the rows first, then one kernel for each side and one for the mask.
#include <algorithm>

#include "../../rows/rows.h"
#include "instances.h"

namespace selfattn::cuda::sm80::backward {

namespace {

// What there is for an element type and a padded dim.
struct Instance {
  Sides sides;
  MaskRegions (*regions)(const AttentionParams&, const BackwardArguments&);
  void (*mask)(const AttentionParams&, const BackwardArguments&, const Statistics&, void*, const Launch&);
};

template <DType kDType, int kDim>
constexpr Instance instance() {
  return {&run_sides<kDType, kDim>, &regions_of_mask<kDType, kDim>, &run_mask<kDType, kDim>};
}

template <DType kDType>
Instance instance_for(int64_t dim) {
  if (dim <= 64) return instance<kDType, 64>();
  if constexpr (kDType != DType::kFloat32) {
    if (dim > 128) return instance<kDType, 256>();
  }
  return instance<kDType, 128>();
}

Instance instance_for(const AttentionParams& p) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  return p.dtype == DType::kBFloat16  ? instance_for<DType::kBFloat16>(dim)
         : p.dtype == DType::kFloat16 ? instance_for<DType::kFloat16>(dim)
                                      : instance_for<DType::kFloat32>(dim);
}

}  // namespace

size_t workspace_bytes(const AttentionParams& p, const BackwardArguments& a) {
  const size_t statistics = statistics_bytes(p);
  if (a.grad_mask.data == nullptr) return statistics;
  return statistics + mask_partial_bytes(instance_for(p).regions(p, a));
}

void run(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  run(p, a, instance_for(p).sides, where);
}

void run(const AttentionParams& p, const BackwardArguments& a, Sides sides, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  const Statistics statistics = statistics_in(where.workspace, p);
  pad_statistics(p, statistics, p.dtype != DType::kFloat32 && is_plain(p, a), where);
  sides(p, a, statistics, where.stream);
  if (a.grad_mask.data == nullptr) return;
  instance_for(p).mask(p, a, statistics, static_cast<char*>(where.workspace) + statistics_bytes(p), where);
}

}  // namespace selfattn::cuda::sm80::backward
