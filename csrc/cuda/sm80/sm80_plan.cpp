#include "plan.h"

#include <algorithm>

#include "../common/divide_up.h"

namespace selfattn::cuda::sm80 {

namespace {

constexpr int64_t kAlignment = 16;  // bytes, of an asynchronous copy

// Keys that one block of a thin call reads. Enough to be worth starting a block for, and few enough splits
// for the merge not to be felt. From the number of keys alone: a row must not depend on its batch.
int64_t keys_of_split(int64_t keys) {
  constexpr int64_t kLeast = 256, kMostSplits = 64;
  return std::max(kLeast, divide_up(divide_up(keys, kMostSplits), kLeast) * kLeast);
}

int64_t splits_of(const AttentionParams& p) {
  return is_thin(p) && p.keys > 0 ? divide_up(p.keys, keys_of_split(p.keys)) : 1;
}

int64_t rows_of(const AttentionParams& p) { return p.batch * p.heads * p.queries; }

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

bool is_plain(const AttentionParams& p) {
  return p.mask.data == nullptr && p.alibi_slopes.data == nullptr && p.softcap == 0.0 && !p.dropout.enabled &&
         p.scale > 1e-30 && p.scale < 1e30 && readable_by_vectors(p.query, p.head_dim) &&
         readable_by_vectors(p.key, p.head_dim) && readable_by_vectors(p.value, p.value_dim);
}

size_t forward_workspace(const AttentionParams& p) {
  const int64_t splits = splits_of(p);
  if (splits == 1) return 0;
  return static_cast<size_t>(rows_of(p) * splits * (3 + p.value_dim)) * sizeof(float);
}

namespace {

// What forward and weights have in common.
Plan plan_scores(const AttentionParams& p, const TileShape& tile) {
  Plan plan;
  plan_call(p, plan);
  const bool folds = tile.folded && p.kv_heads > 0;
  plan.units = p.batch * (folds ? p.kv_heads : p.heads);
  plan.unit_rows = p.queries * (folds ? p.heads / p.kv_heads : 1);
  plan.row_tiles = divide_up(plan.unit_rows, tile.rows);
  plan.split_keys = p.keys;
  return plan;
}

}  // namespace

Plan plan_forward(const AttentionParams& p, const ForwardOutputs& outputs, const TileShape& tile,
                  void* workspace) {
  Plan plan = plan_scores(p, tile);
  plan.outputs = outputs;
  const int64_t pair = 2 * size_of(p.dtype);
  View residual = outputs.out;
  residual.data = outputs.out_residual;
  plan.out_pairs = p.value_dim % 2 == 0 && rows_start_at_multiples(outputs.out, pair) &&
                   rows_start_at_multiples(residual, pair);
  plan.splits = splits_of(p);
  if (plan.splits > 1) {
    plan.split_keys = keys_of_split(p.keys);
    const int64_t states = rows_of(p) * plan.splits;
    plan.partial_max = static_cast<float*>(workspace);
    plan.partial_sum = plan.partial_max + states;
    plan.partial_rounding = plan.partial_sum + states;
    plan.partial_out = plan.partial_rounding + states;
  }
  plan.blocks = plan.units * plan.row_tiles * plan.splits;
  return plan;
}

Plan plan_weights(const AttentionParams& p, const WeightsOutputs& outputs, const TileShape& tile) {
  Plan plan = plan_scores(p, tile);
  plan.weights_outputs = outputs;
  plan.out_pairs = p.keys % 2 == 0;
  plan.key_tiles = divide_up(p.keys, tile.keys);
  plan.blocks = plan.units * plan.row_tiles * plan.key_tiles;
  return plan;
}

}  // namespace selfattn::cuda::sm80
