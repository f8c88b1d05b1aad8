// A function of scores that somebody else has compiled: what it is called with, and which blocks of scores it
// concerns. Those functions are written by selfattn_ext/flex, one library for each; this file is all that
// they know of the kernels, and all that the kernels know of them.
#pragma once

#include <cstdint>

// Kernels of a GPU that are compiled with a function inside: Note [Functions in kernels] in
// cuda/function/function_tile.cuh.
#if defined(SELFATTN_FUNCTION)
#include "selfattn_function_arguments.h"
#endif

namespace selfattn {

namespace cuda {
class FunctionKernels;
}

// Scores of neighbouring queries and keys of one (batch, head), transposed: that of query first_query + i and
// key first_key + j is number j * stride + i. Positions count within the batch element.
struct ScoreTile {
  int64_t batch, head;
  int64_t first_query, queries;
  int64_t first_key, keys;
  int64_t stride;
};

// A tensor that the function reads. Sizes and strides (in elements) have one number for each dimension.
struct CapturedTensor {
  const void* data;
  const int64_t* size;
  const int64_t* stride;
  int64_t rank;
};

// What a call brings to the function. A GPU's kernels get it in a form of their own, see `device`.
struct FunctionInputs {
  const CapturedTensor* tensors;
  const double* numbers;  // constants that are no part of the compiled code
  // Set to 1 where a score that neither function nor map hides reads beside a tensor. Threads write it at the
  // same time: by an atomic store. On the CPU such scores become the NaN of beside_bits, and what is set is a
  // block's own: windows and masks, which come later, may hide them all.
  int32_t* out_of_range;
};

// Of a NaN that no arithmetic makes.
constexpr uint32_t beside_bits(float) { return 0x7fc0be5du; }
constexpr uint64_t beside_bits(double) { return 0x7ff800000000be5du; }

// Numbers are float, or double in a call of float64. All four may be called from several threads at once, and
// are nullable: apply where nothing changes a score, differentiate where its gradient does not change, ...
// The last two need not know who is hidden: gradients of hidden scores are 0.
struct ScoreFunctionTable {
  // What it is compiled for; calls that bring something else are refused.
  int64_t score_bytes;  // 4 or 8
  const char* tensors;  // dtype and dimensions of each: "float32[2] int64[1]"
  int64_t numbers;      // how many

  // Changes scores in place; -inf hides. `apply_unmasked` leaves out what may hide, in blocks that it does
  // not.
  void (*apply)(const FunctionInputs*, const ScoreTile*, void* scores);
  void (*apply_unmasked)(const FunctionInputs*, const ScoreTile*, void* scores);
  // From the gradient of what `apply` makes of `scores` to that of `scores`, in place. 0 stays 0.
  void (*differentiate)(const FunctionInputs*, const ScoreTile*, const void* scores, void* gradient);
  // Adds to sums[i] the gradient of captured tensor i, contiguous; nullptr where it is not wanted.
  void (*add_captured)(const FunctionInputs*, const ScoreTile*, const void* scores, const void* gradient,
                       double* const* sums);

  // Instead of these four: the kernels of a GPU that have the function inside. nullptr for calls on the CPU.
  const cuda::FunctionKernels* device = nullptr;
};

// Who sees a block of scores.
enum class Seen : uint8_t { kNone, kFunctionDecides, kAll };

// Who sees which blocks of scores.
// Strides are 0 where batch elements or heads share the map. Queries and keys behind the last block are seen
// by, and see, nobody.
struct BlockMap {
  const uint8_t* blocks = nullptr;       // Seen; nullable: `apply` concerns all scores
  int64_t stride[3] = {0, 0, 0};         // batch, head, row; 1 from a block to the next in a row
  int64_t query_size = 0, key_size = 0;  // of a block
  int64_t query_blocks = 0, key_blocks = 0;
};

// The function of a call.
struct ScoreFunction {
  const ScoreFunctionTable* table = nullptr;  // nullable: there is none
  FunctionInputs inputs{};
  int64_t first_batch = 0;  // what the function calls the first batch element
  BlockMap map;
#if defined(SELFATTN_FUNCTION)
  FunctionArguments arguments;  // stays last: the launch writes it behind what the library knows
#endif

  constexpr bool any() const { return table != nullptr || map.blocks != nullptr; }
  // Whether gradients are made of the scores that the function was given.
  constexpr bool keeps_scores() const {
    return table != nullptr && (table->differentiate != nullptr || table->add_captured != nullptr);
  }
};

}  // namespace selfattn
