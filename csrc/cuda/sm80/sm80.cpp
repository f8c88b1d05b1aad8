#include "sm80.h"

#include <algorithm>
#include <cstdint>

#include "../function/function_kernels.h"
#include "../mma/forward_plan.h"
#include "../simt/simt.h"
#include "backward/sm80_backward.h"

namespace selfattn::cuda {

namespace sm80 {
namespace {

constexpr int kLeastCapability = 80;

// Whether simt computes the gradients: two tiles of wide float32 numbers do not fit into shared memory as
// pieces.
bool hands_over(const AttentionParams& p) { return !backward::takes(p); }

const char* refuses(const AttentionParams& p, int capability) {
  if (capability < kLeastCapability) return "it needs compute capability 8.0 or later";
  if (p.dtype == DType::kFloat64) return "tensor cores do not multiply float64";
  if (p.head_dim > mma::kMaxDim || p.value_dim > mma::kMaxDim) return "it takes head dims up to 256";
  // Below this, differences of two indices and sums with SeenKeys and a tile's size are exact in 32 bits.
  constexpr int64_t kMost = (int64_t{1} << 30) - 1024;
  if (p.batch > kMost || p.heads > kMost || p.keys > kMost || p.queries > kMost) {
    return "it counts batches, heads, queries and keys up to 2^30";
  }
  if (p.sequences.query_rows > kMost || p.sequences.key_rows > kMost) {
    return "it counts the rows of packed tensors up to 2^30";
  }
  if (may_have_few_queries(p) && p.kv_heads > 0 &&
      p.heads / p.kv_heads * std::min(p.queries, kFewQueries) > kMost) {
    return "it counts the queries of all heads of a kv head up to 2^30 where they are few";
  }
  if (hands_over(p) && !options_of(p).within(kSimt.options)) {
    return "it hands the gradients over to \"simt\", which does not apply all options of the call";
  }
  return nullptr;
}

// The functions compiled for an element type and a padded dim.
struct Instance {
  void (*forward)(const AttentionParams&, const ForwardOutputs&, CUstream_st*, void* workspace);
  void (*few_queries)(const AttentionParams&, const ForwardOutputs&, CUstream_st*, void* workspace);
  void (*weights)(const AttentionParams&, const WeightsOutputs&, CUstream_st*);
};

template <DType kDType, int kDim>
constexpr Instance instance() {
  return {&run_forward<kDType, kDim>, &run_few_queries<kDType, kDim>, &run_weights<kDType, kDim>};
}

template <DType kDType>
Instance instance_for(int64_t dim) {
  return dim <= 32    ? instance<kDType, 32>()
         : dim <= 64  ? instance<kDType, 64>()
         : dim <= 96  ? instance<kDType, 96>()
         : dim <= 128 ? instance<kDType, 128>()
         : dim <= 192 ? instance<kDType, 192>()
                      : instance<kDType, 256>();
}

Instance instance_for(DType dtype, int64_t dim) {
  return dtype == DType::kBFloat16  ? instance_for<DType::kBFloat16>(dim)
         : dtype == DType::kFloat16 ? instance_for<DType::kFloat16>(dim)
                                    : instance_for<DType::kFloat32>(dim);
}

void forward(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  const Instance instance = instance_for(p.dtype, std::max(p.head_dim, p.value_dim));
  instance.forward(p, outputs, where.stream, where.workspace);
}

void weights(const AttentionParams& p, const WeightsOutputs& outputs, const Launch& where) {
  instance_for(p.dtype, p.head_dim).weights(p, outputs, where.stream);
}

size_t backward_workspace(const AttentionParams& p, const BackwardArguments& arguments) {
  if (hands_over(p)) return kSimt.backward_workspace(p, arguments);
  return backward::workspace_bytes(p, arguments);
}

void run_backward(const AttentionParams& p, const BackwardArguments& arguments, const Launch& where) {
  if (hands_over(p)) return kSimt.backward(p, arguments, where);
  backward::run(p, arguments, where);
}

// Scores and softmax are left to simt.
constexpr Kernel entry() {
  Kernel kernel;
  kernel.name = "sm80";
  kernel.description = "tensor cores by mma.sync, tiles copied asynchronously";
  kernel.options =
      OptionSet{Option::kMask,          Option::kOwnMasks,      Option::kAlibiSlopes, Option::kSinks,
                Option::kDropout,       Option::kWindow,        Option::kQueryOffset, Option::kSoftcap,
                Option::kPackedQueries, Option::kPackedKeys,    Option::kKeyLengths,  Option::kQueryOffsets,
                Option::kPages,         Option::kBatchInvariant}
          .with(kFunctionOptions);
  kernel.refuses = &refuses;
  kernel.forward_workspace = &mma::forward_workspace;
  kernel.forward = &forward;
  kernel.weights = &weights;
  kernel.backward_workspace = &backward_workspace;
  kernel.backward = &run_backward;
  return kernel;
}

}  // namespace

void forward_of_few_queries(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& where) {
  const Instance instance = instance_for(p.dtype, std::max(p.head_dim, p.value_dim));
  instance.few_queries(p, outputs, where.stream, where.workspace);
}

}  // namespace sm80

constexpr Kernel kSm80 = sm80::entry();

}  // namespace selfattn::cuda
