#include "sm80.h"

#include <algorithm>
#include <cstdint>

#include "../simt/simt.h"
#include "backward/instances.h"
#include "instances.h"

namespace selfattn::cuda {

namespace sm80 {
namespace {

constexpr int kLeastCapability = 80;

const char* refuses(const AttentionParams& p, int capability) {
  if (capability < kLeastCapability) return "it needs compute capability 8.0 or later";
  if (p.dtype == DType::kFloat64) return "tensor cores do not multiply float64";
  if (p.head_dim > kMaxDim || p.value_dim > kMaxDim) return "it takes head dims up to 256";
  // Differences of two indices, sums with SeenKeys and with a tile's size are exact.
  constexpr int64_t kMost = (int64_t{1} << 30) - 1024;
  if (p.batch > kMost || p.heads > kMost || p.keys > kMost || p.queries > kMost) {
    return "it counts batches, heads, queries and keys up to 2^30";
  }
  if (p.sequences.query_rows > kMost || p.sequences.key_rows > kMost) {
    return "it counts the rows of packed tensors up to 2^30";
  }
  if (may_be_thin(p) && p.kv_heads > 0 && p.heads / p.kv_heads * std::min(p.queries, kThinQueries) > kMost) {
    return "it counts the queries of all heads of a kv head up to 2^30 where they are few";
  }
  return nullptr;
}

// The padded dims that there are kernels for.
template <DType kDType>
auto forward_for(int64_t dim) {
  return dim <= 32    ? &run_forward<kDType, 32>
         : dim <= 64  ? &run_forward<kDType, 64>
         : dim <= 96  ? &run_forward<kDType, 96>
         : dim <= 128 ? &run_forward<kDType, 128>
         : dim <= 192 ? &run_forward<kDType, 192>
                      : &run_forward<kDType, 256>;
}
template <DType kDType>
auto weights_for(int64_t dim) {
  return dim <= 32    ? &run_weights<kDType, 32>
         : dim <= 64  ? &run_weights<kDType, 64>
         : dim <= 96  ? &run_weights<kDType, 96>
         : dim <= 128 ? &run_weights<kDType, 128>
         : dim <= 192 ? &run_weights<kDType, 192>
                      : &run_weights<kDType, 256>;
}

void forward(const AttentionParams& p, const ForwardOutputs& outputs, const Launch& launch) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  const auto run = p.dtype == DType::kBFloat16  ? forward_for<DType::kBFloat16>(dim)
                   : p.dtype == DType::kFloat16 ? forward_for<DType::kFloat16>(dim)
                                                : forward_for<DType::kFloat32>(dim);
  run(p, outputs, launch.stream, launch.workspace);
}

void weights(const AttentionParams& p, const WeightsOutputs& outputs, const Launch& launch) {
  const auto run = p.dtype == DType::kBFloat16  ? weights_for<DType::kBFloat16>(p.head_dim)
                   : p.dtype == DType::kFloat16 ? weights_for<DType::kFloat16>(p.head_dim)
                                                : weights_for<DType::kFloat32>(p.head_dim);
  run(p, outputs, launch.stream);
}

// Where simt computes the gradients: tiles of wide float32 numbers do not fit into shared memory, twice as
// pieces.
bool hands_over(const AttentionParams& p) { return !backward::takes(p); }

size_t backward_workspace(const AttentionParams& p, const BackwardArguments& arguments) {
  if (hands_over(p)) return kSimt.backward_workspace(p, arguments);
  return backward::workspace_bytes(p, arguments);
}

void run_backward(const AttentionParams& p, const BackwardArguments& arguments, const Launch& launch) {
  if (hands_over(p)) return kSimt.backward(p, arguments, launch);
  backward::run(p, arguments, launch);
}

}  // namespace
}  // namespace sm80

const Kernel kSm80 = {
    "sm80",
    "tensor cores by mma.sync, tiles copied asynchronously",
    {Option::kMask, Option::kOwnMasks, Option::kAlibiSlopes, Option::kSinks, Option::kDropout,
     Option::kWindow, Option::kQueryOffset, Option::kSoftcap, Option::kPackedQueries, Option::kPackedKeys,
     Option::kKeyLengths, Option::kQueryOffsets, Option::kPages},
    &sm80::refuses,
    &sm80::forward_workspace,
    &sm80::forward,
    &sm80::weights,
    &sm80::backward_workspace,
    &sm80::run_backward,
    /*scores=*/nullptr,
    /*scores_backward=*/nullptr,
    /*masked_softmax=*/nullptr,
    /*masked_softmax_backward=*/nullptr,
};

}  // namespace selfattn::cuda
