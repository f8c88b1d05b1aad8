#include "plan.h"

#include <algorithm>

#include "../common/divide_up.h"

namespace selfattn::cuda::sm80 {

namespace {

constexpr int64_t kAlignment = 16;  // bytes, of an asynchronous copy

// What the splits may leave. Calls that would need more are cut into launches for some elements of the batch
// each: packed calls in which any sequence may be thin, for all that the host knows.
constexpr int64_t kMostPartialBytes = int64_t{256} << 20;

// Of the thin sequence that is cut into most. A shorter one than the longest may have more than that has.
int64_t most_splits(const AttentionParams& p) {
  if (p.sequences.key_starts == nullptr && p.sequences.key_lengths == nullptr) {
    return splits_of(static_cast<int>(p.keys)).count;
  }
  return std::min<int64_t>(kMostSplits, std::max<int64_t>(1, divide_up(p.keys, int64_t{kLeastSplitKeys})));
}

// How the states that splits leave are laid out, in floats.
struct Partials {
  int64_t queries;  // of a thin sequence
  int64_t splits;
  int64_t of_batch;  // numbers of one element
  int64_t batches;   // of a launch

  explicit Partials(const AttentionParams& p)
      : queries(std::min(p.queries, kThinQueries)),
        splits(most_splits(p)),
        of_batch(p.heads * queries * splits * (3 + p.value_dim)),
        batches(p.batch) {
    if (splits == 1) of_batch = 0;
    const int64_t most = kMostPartialBytes / static_cast<int64_t>(sizeof(float));
    if (of_batch > 0) batches = std::min(p.batch, std::max<int64_t>(1, most / of_batch));
  }
};

// Of the elements from plan.first_batch on.
void count_blocks(Plan& plan, const TileShape& tile) {
  const AttentionParams& p = plan.params;
  plan.batches = std::min(plan.batches, p.batch - plan.first_batch);
  const int64_t units = plan.batches * (tile.folded ? p.kv_heads : p.heads);
  plan.blocks = units * plan.row_tiles * plan.splits * plan.key_tiles;
}

}  // namespace

// Strides of dimensions that hold one element are never used, but telling them apart is worth no code.
bool rows_start_at_multiples(const View& view, int64_t bytes) {
  bool all = reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0;
  for (int d = 0; d < 3; ++d) all = all && view.stride[d] * size_of(view.dtype) % bytes == 0;
  return all;
}

bool readable_by_vectors(const View& view, int64_t columns) {
  return columns * size_of(view.dtype) % kAlignment == 0 && rows_start_at_multiples(view, kAlignment);
}

bool readable_by_pairs(const View& mask, int64_t columns) {
  return mask.data != nullptr && columns % 2 == 0 && mask.stride[3] == 1 &&
         rows_start_at_multiples(mask, 2 * size_of(mask.dtype));
}

int pieces_of(const AttentionParams& p) {
  if (p.dtype != DType::kFloat32) return 1;
  switch (p.float32_precision) {
    case Float32Precision::kHighest:
      return 3;
    case Float32Precision::kHigh:
      return 2;
    case Float32Precision::kMedium:
      return 1;
  }
  return 3;
}

bool is_thin(const AttentionParams& p) { return p.queries <= kThinQueries; }

bool may_be_thin(const AttentionParams& p) { return is_thin(p) || p.sequences.query_starts != nullptr; }

bool is_plain(const AttentionParams& p) {
  return p.mask.data == nullptr && p.alibi_slopes.data == nullptr && p.softcap == 0.0 && !p.dropout.enabled &&
         p.scale > 1e-30 && p.scale < 1e30 && readable_by_vectors(p.query, p.head_dim) &&
         readable_by_vectors(p.key, p.head_dim) && readable_by_vectors(p.value, p.value_dim);
}

size_t forward_workspace(const AttentionParams& p) {
  if (!may_be_thin(p)) return 0;
  const Partials partials(p);
  return static_cast<size_t>(partials.batches * partials.of_batch) * sizeof(float);
}

namespace {

// What forward and weights have in common.
Plan plan_scores(const AttentionParams& p, const TileShape& tile) {
  Plan plan;
  plan_call(p, plan);
  const int64_t group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
  const int64_t queries = tile.folded ? std::min(p.queries, kThinQueries) * group : p.queries;
  plan.row_tiles = divide_up(queries, tile.rows);
  plan.batches = p.batch;
  return plan;
}

}  // namespace

Plan plan_forward(const AttentionParams& p, const ForwardOutputs& outputs, const TileShape& tile,
                  void* workspace) {
  Plan plan = plan_scores(p, tile);
  plan.outputs = outputs;
  if (p.sequences.query_starts != nullptr) plan.outputs.out.stride[0] = 0;
  const int64_t pair = 2 * size_of(p.dtype);
  View residual = plan.outputs.out;
  residual.data = outputs.out_residual;
  plan.out_pairs = p.value_dim % 2 == 0 && rows_start_at_multiples(plan.outputs.out, pair) &&
                   rows_start_at_multiples(residual, pair);
  if (tile.folded) {
    const Partials partials(p);
    plan.splits = partials.splits;
    plan.batches = partials.batches;
    plan.partial_queries = partials.queries;
    const int64_t states = plan.batches * p.heads * partials.queries * plan.splits;
    plan.partial_max = static_cast<float*>(workspace);
    plan.partial_sum = plan.partial_max + states;
    plan.partial_rounding = plan.partial_sum + states;
    plan.partial_out = plan.partial_rounding + states;
  }
  count_blocks(plan, tile);
  return plan;
}

bool next_launch(Plan& plan, const TileShape& tile) {
  plan.first_batch += plan.batches;
  if (plan.first_batch >= plan.params.batch) return false;
  count_blocks(plan, tile);
  return true;
}

Plan plan_weights(const AttentionParams& p, const WeightsOutputs& outputs, const TileShape& tile) {
  Plan plan = plan_scores(p, tile);
  plan.weights_outputs = outputs;
  plan.out_pairs = p.keys % 2 == 0 && rows_start_at_multiples(outputs.weights, 2 * size_of(p.dtype));
  plan.key_tiles = divide_up(p.keys, tile.keys);
  count_blocks(plan, tile);
  return plan;
}

}  // namespace selfattn::cuda::sm80
