// The interface between kernels and separately compiled functions of scores. selfattn_ext/flex writes those
// functions, one library for each; this file is all that they know of the kernels, and all that the kernels
// know of them.
#pragma once

#include <cstdint>

// GPU kernels with a function inside are compiled with its arguments: Note [Functions in kernels] in
// cuda/function/function_tile.cuh.
#if defined(SELFATTN_FUNCTION)
#include "selfattn_function_arguments.h"
#endif

namespace selfattn {

namespace cuda {
class FunctionKernels;
}

// Scores of neighbouring queries and keys of one (batch, head), transposed: the score of query first_query +
// i and key first_key + j is number j * stride + i. Positions count within the batch element.
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

// The inputs of the function in a call. GPU kernels get them in another form, see `device`.
struct FunctionInputs {
  const CapturedTensor* tensors;
  const double* numbers;  // constants that are no part of the compiled code
  // Set to 1 if a score that neither function nor map hides reads outside a tensor. Threads write it at the
  // same time, by an atomic store. On the CPU such scores become the NaN of beside_bits, and the number is a
  // block's own: windows and masks, which come later, may hide all such scores.
  int32_t* out_of_range;
};

// The bits of a NaN that no arithmetic makes.
constexpr uint32_t beside_bits(float) { return 0x7fc0be5du; }
constexpr uint64_t beside_bits(double) { return 0x7ff800000000be5du; }

// The entry points of a function. Numbers are float, or double in a call of float64. Several threads may call
// all four at once. Each is null if it would do nothing: apply if no score changes, differentiate if no
// gradient changes, and so on. The last two need not know what is hidden: gradients of hidden scores are 0.
struct ScoreFunctionTable {
  // The inputs that it is compiled for; calls with others are refused.
  int64_t score_bytes;  // 4 or 8
  const char* tensors;  // dtype and dimensions of each: "float32[2] int64[1]"
  int64_t numbers;      // how many

  // Changes scores in place; -inf hides. `apply_unmasked` is for blocks where the function hides nothing, and
  // does not ask whether it does.
  void (*apply)(const FunctionInputs*, const ScoreTile*, void* scores);
  void (*apply_unmasked)(const FunctionInputs*, const ScoreTile*, void* scores);
  // Turns the gradient of what `apply` makes of `scores` into that of `scores`, in place. 0 stays 0.
  void (*differentiate)(const FunctionInputs*, const ScoreTile*, const void* scores, void* gradient);
  // Adds the gradient of captured tensor i to sums[i], contiguous; sums[i] is null if nobody wants it.
  void (*add_captured)(const FunctionInputs*, const ScoreTile*, const void* scores, const void* gradient,
                       double* const* sums);

  // GPU kernels with the function inside, which replace these four; null for calls on the CPU.
  const cuda::FunctionKernels* device = nullptr;
};

// How much of a block of scores is seen: nothing, what the function shows, or all of it.
enum class Seen : uint8_t { kNone, kFunctionDecides, kAll };

// How much of each block of scores is seen. Strides are 0 if batch elements or heads share the map. Queries
// past the last block see nothing, and keys past it are not seen.
struct BlockMap {
  const uint8_t* blocks = nullptr;       // Seen; null if `apply` concerns all scores
  int64_t stride[3] = {0, 0, 0};         // batch, head, row; 1 from a block to the next in a row
  int64_t query_size = 0, key_size = 0;  // sizes of a block
  int64_t query_blocks = 0, key_blocks = 0;
};

// The function of a call.
struct ScoreFunction {
  const ScoreFunctionTable* table = nullptr;  // null if there is none
  FunctionInputs inputs{};
  int64_t first_batch = 0;  // the first batch element's number for the function
  BlockMap map;
#if defined(SELFATTN_FUNCTION)
  FunctionArguments arguments;  // stays last: the launch writes it behind what the library knows
#endif

  constexpr bool any() const { return table != nullptr || map.blocks != nullptr; }
  // Whether gradients need the scores that the function was given.
  constexpr bool keeps_scores() const {
    return table != nullptr && (table->differentiate != nullptr || table->add_captured != nullptr);
  }
};

}  // namespace selfattn
