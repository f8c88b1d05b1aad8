// A backward call: statistics of the rows first, then a kernel for each side and one for the mask.
#include "sm80_backward.h"

#include <algorithm>

#include "../../../core/options.h"
#include "../../function/function_kernels.h"
#include "../../mma/forward_plan.h"
#include "../sm80.h"

namespace selfattn::cuda::sm80 {

namespace backward {

namespace {

constexpr int64_t kMaxFloat32Dim = 128;  // more does not fit into shared memory as pieces

// The kernels of this folder apply these: Note [Declared options] in core/options.h. Keys in pages have no
// gradient.
constexpr OptionSet kOptions =
    OptionSet{Option::kMask,          Option::kOwnMasks,   Option::kAlibiSlopes, Option::kSinks,
              Option::kDropout,       Option::kWindow,     Option::kQueryOffset, Option::kSoftcap,
              Option::kPackedQueries, Option::kPackedKeys, Option::kKeyLengths,  Option::kQueryOffsets,
              Option::kBatchInvariant}
        .with(kFunctionOptions);

// The functions compiled for an element type and a padded dim.
struct Instance {
  mma::backward::Sides sides;
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

bool takes(const AttentionParams& p) {
  const int64_t most = p.dtype == DType::kFloat32 ? kMaxFloat32Dim : mma::kMaxDim;
  return p.head_dim <= most && p.value_dim <= most && options_of(p).within(kOptions);
}

size_t workspace_bytes(const AttentionParams& p, const BackwardArguments& a) {
  const size_t statistics = mma::backward::statistics_bytes(p);
  if (a.grad_mask.data == nullptr) return statistics;
  return statistics + mask_partial_bytes(instance_for(p).regions(p, a));
}

void run(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  const Statistics statistics = mma::backward::prepare_statistics(p, a, where);
  instance_for(p).sides(p, a, statistics, where.stream);
  gradient_of_mask(p, a, statistics, where);
}

}  // namespace backward

void gradient_of_mask(const AttentionParams& p, const BackwardArguments& a,
                      const mma::backward::Statistics& statistics, const Launch& where) {
  if (a.grad_mask.data == nullptr) return;
  void* const partial = static_cast<char*>(where.workspace) + mma::backward::statistics_bytes(p);
  backward::instance_for(p).mask(p, a, statistics, partial, where);
}

}  // namespace selfattn::cuda::sm80
