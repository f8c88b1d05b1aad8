#include "../../../core/options.h"
#include "../../function/function_kernels.h"
#include "../../rows/rows.h"
#include "../plan.h"
#include "plan.h"

namespace selfattn::cuda::sm80::backward {

namespace {

// Those that the kernels of this folder apply: Note [Declared options] in core/options.h. Keys in pages have
// no gradient.
constexpr OptionSet kOptions =
    OptionSet{Option::kMask,          Option::kOwnMasks,   Option::kAlibiSlopes, Option::kSinks,
              Option::kDropout,       Option::kWindow,     Option::kQueryOffset, Option::kSoftcap,
              Option::kPackedQueries, Option::kPackedKeys, Option::kKeyLengths,  Option::kQueryOffsets,
              Option::kBatchInvariant}
        .with(kFunctionOptions);

// Of which statistics are kept.
int64_t rows_of(const AttentionParams& p) {
  const bool packed = p.sequences.query_starts != nullptr;
  return (packed ? 1 : p.batch) * p.heads * padded_queries(p);
}

bool writable_by_pairs(const View& view, int64_t columns) {
  return columns % 2 == 0 && rows_start_at_multiples(view, 2 * size_of(view.dtype));
}

}  // namespace

bool takes(const AttentionParams& p) {
  const int64_t most = p.dtype == DType::kFloat32 ? kMaxFloat32Dim : kMaxDim;
  return p.head_dim <= most && p.value_dim <= most && options_of(p).within(kOptions);
}

bool is_plain(const AttentionParams& p, const BackwardArguments& a) {
  return sm80::is_plain(p) && a.grad_weights.data == nullptr && a.grad_slopes_rows == nullptr &&
         readable_by_vectors(a.grad_out, p.value_dim);
}

size_t statistics_bytes(const AttentionParams& p) {
  return rows::row_gradients_bytes(p) + static_cast<size_t>(4 * rows_of(p)) * sizeof(float);
}

Statistics statistics_in(void* workspace, const AttentionParams& p) {
  Statistics statistics;
  statistics.queries = padded_queries(p);
  const int64_t count = rows_of(p);
  statistics.shift = reinterpret_cast<float*>(static_cast<char*>(workspace) + rows::row_gradients_bytes(p));
  statistics.inverse_sum = statistics.shift + count;
  statistics.delta = statistics.inverse_sum + count;
  statistics.large_shift = statistics.delta + count;
  return statistics;
}

Plan plan_side(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
               int64_t rows, bool owns_queries) {
  Plan plan;
  plan_call(p, plan);
  plan.arguments = a;
  plan.statistics = statistics;
  plan.units = p.batch * (owns_queries ? p.heads : p.kv_heads);
  plan.row_tiles = divide_up(owns_queries ? p.queries : p.keys, rows);
  plan.blocks = plan.units * plan.row_tiles;
  plan.grad_out_vectors = readable_by_vectors(a.grad_out, p.value_dim);
  plan.grad_query_vectors = readable_by_vectors(a.grad_query, p.head_dim);
  plan.grad_key_vectors = readable_by_vectors(a.grad_key, p.head_dim);
  plan.grad_value_vectors = readable_by_vectors(a.grad_value, p.value_dim);
  plan.grad_query_pairs = writable_by_pairs(a.grad_query, p.head_dim);
  plan.grad_key_pairs = writable_by_pairs(a.grad_key, p.head_dim);
  plan.grad_value_pairs = writable_by_pairs(a.grad_value, p.value_dim);
  return plan;
}

}  // namespace selfattn::cuda::sm80::backward
