// What a launch of a forward kernel is told: the call, and how its work is divided. Plain C++, filled on the
// host from shapes, strides and addresses alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/attention_params.h"
#include "../../core/philox.h"
#include "../common/row_alignment.h"
#include "../split/split_keys.h"

namespace selfattn::cuda::mma {

// A unit is what shares keys and values: one query head, or of few-query sequences all query heads of a kv
// head, their queries one after another ("folded"). Its rows are cut into tiles; of few-query sequences its
// keys into splits.
//
// The host knows the longest sequence. What follows from the length of each is worked out by its blocks.
struct Plan {
  ForwardOutputs outputs;          // of the forward
  WeightsOutputs weights_outputs;  // of the weights

  // Elements of the batch that this launch takes, and the splits of few-query sequences.
  SplitLaunch<float> split_launch;

  // Of the longest sequence.
  int64_t row_tiles = 0;
  int64_t key_tiles = 1;  // of the weights, which have a block for each
  int64_t blocks = 0;

  float scale = 1.0f;
  float scale_log2 = 1.0f;     // scale * log2(e)
  float dropout_scale = 1.0f;  // of the output: weights themselves are only dropped
  int pieces = 1;              // of float32 numbers, see pieces.cuh

  // Whether rows can be read and results written 16 bytes at a time, results written and masks read two
  // elements at a time.
  bool query_vectors = false;
  bool key_vectors = false;
  bool value_vectors = false;
  bool out_vectors = false;
  bool out_pairs = false;
  bool mask_pairs = false;

  bool folds = false;  // where the kernel leaves the choice to the plan: see Fold in work.cuh

  AttentionParams params;  // last: see FunctionArguments in core/score_function.h
};

constexpr int64_t kMaxDim = 256;

constexpr double kLog2E = 1.4426950408889634;

// How a kernel cuts its work.
struct TileShape {
  int64_t rows;
  int64_t keys;
  bool folded;  // all query heads of a kv head are one unit, as of few-query sequences
};

// Of a launch for the first elements of the batch.
Plan plan_forward(const AttentionParams& params, const ForwardOutputs& outputs, const TileShape& tile,
                  void* workspace);
// Moves on to the elements behind those of the last launch. Returns whether there are any.
bool next_launch(Plan& plan, const TileShape& tile);
Plan plan_weights(const AttentionParams& params, const WeightsOutputs& outputs, const TileShape& tile);

// Whether the plain kernels apply all options of a call, whose scale must be positive and whose rows readable
// 16 bytes at a time.
bool is_bare(const AttentionParams& params);

size_t forward_workspace(const AttentionParams& params);

// Whether the rows of a view, of `columns`, can be read or written 16 bytes at a time, or the elements of a
// mask two at a time.
bool readable_by_vectors(const View& view, int64_t columns);
bool readable_by_pairs(const View& mask, int64_t columns);

// Of numbers of the call's dtype at its precision, see pieces.cuh.
int pieces_of(const AttentionParams& params);

// What the plans of forward and backward have in common.
template <class AnyPlan>
void plan_call(const AttentionParams& p, AnyPlan& plan) {
  plan.params = p;
  plan.scale = static_cast<float>(p.scale);
  plan.scale_log2 = static_cast<float>(p.scale * kLog2E);
  if (p.dropout.enabled) plan.dropout_scale = static_cast<float>(dropout_keep_scale(p.dropout.probability));
  plan.pieces = pieces_of(p);
  plan.query_vectors = readable_by_vectors(p.query, p.head_dim);
  plan.key_vectors = readable_by_vectors(p.key, p.head_dim);
  plan.value_vectors = readable_by_vectors(p.value, p.value_dim);
  plan.mask_pairs = readable_by_pairs(p.mask, p.keys);
}

}  // namespace selfattn::cuda::mma
