#include "forward_plan.h"

#include <algorithm>

#include "../../core/options.h"

namespace selfattn::cuda::mma {

namespace {

constexpr int64_t kAlignment = 16;  // bytes that an asynchronous copy takes at a time

// The bare kernels, forward and backward, apply these: Note [Declared options] in core/options.h.
// kBatchInvariant is not among them: whether rows can be read by vectors may differ from chunk to chunk of a
// sequence, and the kernel would change with it.
constexpr OptionSet kBareOptions = {Option::kSinks,         Option::kWindow,     Option::kQueryOffset,
                                    Option::kPackedQueries, Option::kPackedKeys, Option::kKeyLengths,
                                    Option::kQueryOffsets,  Option::kPages};
// Bare kernels take scales between these: neither the product with log2(e) nor its inverse vanishes or
// overflows in float32.
constexpr double kLeastScale = 1e-30, kMostScale = 1e30;

void count_blocks(Plan& plan, const TileShape& tile) {
  const AttentionParams& p = plan.params;
  const int64_t units = plan.split_launch.batches * (tile.folded ? p.kv_heads : p.heads);
  plan.blocks = units * plan.row_tiles * plan.split_launch.splits * plan.key_tiles;
}

}  // namespace

bool readable_by_vectors(const View& view, int64_t columns) {
  return columns * size_of(view.dtype) % kAlignment == 0 && rows_start_at_multiples(view, kAlignment);
}

bool readable_by_pairs(const View& mask, int64_t columns) {
  return mask.data != nullptr && columns % 2 == 0 && mask.stride[3] == 1 &&
         rows_start_at_multiples(mask, 2 * size_of(mask.dtype));
}

bool readable_by_chunks(const View& mask) {
  return mask.data != nullptr && mask.dtype != DType::kFloat64 && mask.stride[3] == 1 &&
         rows_start_at_multiples(mask, kAlignment);
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

bool is_bare(const AttentionParams& p) {
  return options_of(p).within(kBareOptions) && p.scale > kLeastScale && p.scale < kMostScale &&
         readable_by_vectors(p.query, p.head_dim) && readable_by_vectors(p.key, p.head_dim) &&
         readable_by_vectors(p.value, p.value_dim);
}

size_t forward_workspace(const AttentionParams& p) { return split_workspace<float>(p, /*rounds=*/true); }

namespace {

// Fills what the plans of forward and weights have in common.
Plan plan_scores(const AttentionParams& p, const TileShape& tile) {
  Plan plan;
  plan_call(p, plan);
  const int64_t group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
  const int64_t queries = tile.folded ? std::min(p.queries, kFewQueries) * group : p.queries;
  plan.row_tiles = divide_up(queries, tile.rows);
  plan.split_launch.batches = p.batch;
  return plan;
}

}  // namespace

Plan plan_forward(const AttentionParams& p, const ForwardOutputs& outputs, const TileShape& tile,
                  void* workspace) {
  Plan plan = plan_scores(p, tile);
  plan.outputs = outputs;
  if (p.sequences.query_starts != nullptr) plan.outputs.out.stride[0] = 0;
  View residual = plan.outputs.out;
  residual.data = plan.outputs.out_residual;
  plan.out_vectors =
      readable_by_vectors(plan.outputs.out, p.value_dim) && readable_by_vectors(residual, p.value_dim);
  plan.out_pairs = writable_by_pairs(p, plan.outputs);
  if (tile.folded) plan.split_launch = first_split_launch<float>(p, workspace, /*rounds=*/true);
  count_blocks(plan, tile);
  return plan;
}

bool next_launch(Plan& plan, const TileShape& tile) {
  if (!next_split_launch(plan.params, plan.split_launch)) return false;
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

}  // namespace selfattn::cuda::mma
