// The plan of a forward launch: the call, and how its work is divided among blocks. Plain C++: the host fills
// it from shapes, strides and addresses alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/attention_params.h"
#include "../../core/philox.h"
#include "../common/row_alignment.h"
#include "../split/split_keys.h"

namespace selfattn::cuda::mma {

// A unit shares keys and values. It is one query head or, in few-query sequences, all query heads of a kv
// head with their queries one after another ("folded"). Its rows are cut into tiles and, in few-query
// sequences, its keys into splits.
//
// The host knows only the longest sequence. Blocks work out what follows from the length of their own.
struct Plan {
  ForwardOutputs outputs;          // set in plans of the forward
  WeightsOutputs weights_outputs;  // set in plans of the weights

  // The batch elements that this launch takes, and the splits of few-query sequences.
  SplitLaunch<float> split_launch;

  // These count what the longest sequence has.
  int64_t row_tiles = 0;
  int64_t key_tiles = 1;  // for the weights, which have a block for each
  int64_t blocks = 0;

  float scale = 1.0f;
  float scale_log2 = 1.0f;     // scale * log2(e)
  float dropout_scale = 1.0f;  // a factor of the output: weights themselves are only dropped
  int pieces = 1;              // how many a float32 number is split into, see pieces.cuh

  // Whether rows can be read and results written 16 bytes at a time, results written and masks read two
  // elements at a time.
  bool query_vectors = false;
  bool key_vectors = false;
  bool value_vectors = false;
  bool out_vectors = false;
  bool out_pairs = false;
  bool mask_pairs = false;
  bool mask_chunks = false;

  bool folds = false;  // read only by kernels that leave the choice to the plan: see Fold in work.cuh

  AttentionParams params;  // last: see FunctionArguments in core/score_function.h
};

constexpr int64_t kMaxDim = 256;

constexpr double kLog2E = 1.4426950408889634;

// How a kernel cuts its work.
struct TileShape {
  int64_t rows;
  int64_t keys;
  bool folded;  // all query heads of a kv head are one unit
};

// Plans the launch for the first elements of the batch.
Plan plan_forward(const AttentionParams& params, const ForwardOutputs& outputs, const TileShape& tile,
                  void* workspace);
// Moves on to the elements after those of the last launch. Returns whether there are any.
bool next_launch(Plan& plan, const TileShape& tile);
Plan plan_weights(const AttentionParams& params, const WeightsOutputs& outputs, const TileShape& tile);

// Whether the bare kernels take a call: they apply all its options, its scale is positive, and its rows can
// be read 16 bytes at a time.
bool is_bare(const AttentionParams& params);

size_t forward_workspace(const AttentionParams& params);

// Whether the rows of a view, which have `columns` elements, can be read or written 16 bytes at a time, or
// the elements of a mask two at a time.
bool readable_by_vectors(const View& view, int64_t columns);
bool readable_by_pairs(const View& mask, int64_t columns);
// Whether 16 neighbouring elements of a mask, from a multiple of 16 on, can be read 16 bytes at a time.
bool readable_by_chunks(const View& mask);

// How many pieces a number of the call's dtype has at its precision, see pieces.cuh.
int pieces_of(const AttentionParams& params);

// Fills what the plans of forward and backward have in common.
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
  plan.mask_chunks = readable_by_chunks(p.mask);
}

}  // namespace selfattn::cuda::mma
