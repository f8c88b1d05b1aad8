// The function of a call (core/score_function.h) on single scores of a tile.
//
// Note [Functions in kernels]
//     The kernels of the library have no function inside: FunctionTile is then empty, and costs nothing. For
//     a call with a function, the kernels that it takes are compiled once more when they are first launched
//     (function_kernels.h), from these very sources, with SELFATTN_FUNCTION defined and two headers that
//     selfattn_ext/flex writes: selfattn_function_arguments.h, with what the function reads (it becomes the
//     end of AttentionParams, and with it of a kernel's first parameter), and selfattn_function.h, with the
//     function itself.
#pragma once

#include "../common/elementary.cuh"

#if defined(SELFATTN_FUNCTION)
#include "../../core/integers.h"
#include "../../core/score_function_math.h"
#include "selfattn_function.h"
#endif

namespace selfattn::cuda {

#if defined(SELFATTN_FUNCTION)

// Of one head of a batch element, from query `first_query` on.
template <class T>
class FunctionTile {
 public:
  static constexpr bool kAny = true;

  __device__ __forceinline__ FunctionTile(const ScoreFunction& of, int64_t batch, int64_t head,
                                          int64_t first_query)
      : function(of),
        blocks_(of.map.blocks + batch * of.map.stride[0] + head * of.map.stride[1]),
        batch_(static_cast<int32_t>(of.first_batch + batch)),
        head_(static_cast<int32_t>(head)),
        first_query_(static_cast<int32_t>(first_query)) {}

  // Column 0 becomes `first_key`.
  __device__ __forceinline__ void move_to(int64_t first_key) { first_key_ = static_cast<int32_t>(first_key); }

  __device__ __forceinline__ bool has_map() const { return function.map.blocks != nullptr; }
  __device__ __forceinline__ bool shows(int row, int column) const {
    return seen(row, column) != Seen::kByNobody;
  }

  // Any of the first rows and columns.
  __device__ __forceinline__ bool map_shows(int rows, int columns) const {
    const BlockMap& map = function.map;
    if (map.blocks == nullptr) return true;
    const int last_query = block_of(first_query_ + rows - 1, map.query_size);
    const int last_key = block_of(first_key_ + columns - 1, map.key_size);
    for (int query = block_of(first_query_, map.query_size); query <= last_query; ++query) {
      for (int key = block_of(first_key_, map.key_size); key <= last_key; ++key) {
        if (seen_block(query, key) != Seen::kByNobody) return true;
      }
    }
    return false;
  }

  // From a score to what the function makes of it, -inf where it or the map hides.
  __device__ __forceinline__ T score(int row, int column, T given) const {
    const Seen by = seen(row, column);
    if (by == Seen::kByNobody) return -infinity<T>();
    return score_function::modified(function.arguments, by == Seen::kByEverybody, batch_, head_,
                                    first_query_ + row, first_key_ + column, given);
  }
  // Whether they hide an element whatever its score is: whether they hide one of 0, for functions whose -inf
  // does not depend on the score.
  __device__ __forceinline__ bool hides(int row, int column) const {
    return score(row, column, T(0)) == -infinity<T>();
  }
  // From the gradient of what the function returned to that of `given`. Never -0.
  __device__ __forceinline__ T gradient(int row, int column, T given, T grad) const {
    return score_function::gradient(function.arguments, batch_, head_, first_query_ + row,
                                    first_key_ + column, given, grad) +
           T(0);
  }

 private:
  __device__ __forceinline__ Seen seen(int row, int column) const {
    const BlockMap& map = function.map;
    if (map.blocks == nullptr) return Seen::kByWhomTheFunctionShows;
    return seen_block(block_of(first_query_ + row, map.query_size),
                      block_of(first_key_ + column, map.key_size));
  }
  __device__ __forceinline__ Seen seen_block(int query, int key) const {
    const BlockMap& map = function.map;
    if (query >= map.query_blocks || key >= map.key_blocks) return Seen::kByNobody;
    return static_cast<Seen>(blocks_[query * map.stride[2] + key]);
  }
  // In 32 bits, as positions are: a quotient of 64 takes several times as long.
  static __device__ __forceinline__ int block_of(int32_t position, int64_t size) {
    constexpr int64_t kMost = int64_t{1} << 31;
    return static_cast<int>(static_cast<uint32_t>(position) / static_cast<uint32_t>(smaller(size, kMost)));
  }

  const ScoreFunction& function;
  const uint8_t* const blocks_;
  const int32_t batch_, head_, first_query_;
  int32_t first_key_ = 0;
};

#else

template <class T>
class FunctionTile {
 public:
  static constexpr bool kAny = false;

  __device__ __forceinline__ FunctionTile(const ScoreFunction&, int64_t, int64_t, int64_t) {}
  __device__ __forceinline__ void move_to(int64_t) {}
  __device__ __forceinline__ bool has_map() const { return false; }
  __device__ __forceinline__ bool shows(int, int) const { return true; }
  __device__ __forceinline__ T score(int, int, T given) const { return given; }
  __device__ __forceinline__ bool hides(int, int) const { return false; }
  __device__ __forceinline__ T gradient(int, int, T, T grad) const { return grad; }
};

#endif

// Whether the map shows any of these queries of a head any of these keys.
template <class T>
__device__ __forceinline__ bool map_shows(const ScoreFunction& function, int64_t batch, int64_t head,
                                          int64_t first_query, int queries, int64_t first_key, int keys) {
  if constexpr (FunctionTile<T>::kAny) {
    FunctionTile<T> tile(function, batch, head, first_query);
    tile.move_to(first_key);
    return tile.map_shows(queries, keys);
  }
  return true;
}

}  // namespace selfattn::cuda
