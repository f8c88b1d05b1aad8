// The function of a call (core/score_function.h) on single scores of a tile.
//
// Note [Functions in kernels]
//     The kernels of the library contain no function: FunctionTile is then empty, and costs nothing. For a
//     call with a function, the kernels that it uses are compiled once more when they are first launched
//     (function_kernels.h), from the same sources, with SELFATTN_FUNCTION defined and two headers that
//     selfattn_ext/flex writes. One declares the tensors and numbers that the function reads
//     (FunctionArguments becomes the end of AttentionParams, and so of a kernel's first parameter). The other
//     defines the function.
#pragma once

#include "../../core/score_function.h"
#include "../common/elementary.cuh"

#if defined(SELFATTN_FUNCTION)
#include "../../core/integers.h"
#include "../../core/score_function_math.h"

namespace selfattn::score_function {

// The addition of a score to the gradient of a captured tensor. `place` is the element; -1 for none.
template <class T>
struct CapturedPart {
  int tensor;
  int64_t place;
  T gradient;
};

}  // namespace selfattn::score_function

#include "selfattn_function.h"
#endif

namespace selfattn::cuda {

// Which scores of a tile the map shows. If `alike`, `by` holds for all of them; otherwise their blocks
// differ.
struct SeenTile {
  Seen by = Seen::kFunctionDecides;
  bool alike = true;
};
__device__ __forceinline__ bool hides_all(SeenTile seen) { return seen.alike && seen.by == Seen::kNone; }

#if defined(SELFATTN_FUNCTION)

// The map of blocks of one head of a batch element.
class HeadMap {
 public:
  __device__ __forceinline__ HeadMap(const BlockMap& of, int64_t batch, int64_t head)
      : map(of), blocks_(of.blocks + batch * of.stride[0] + head * of.stride[1]) {}

  __device__ __forceinline__ SeenTile tile(int32_t first_query, int queries, int32_t first_key,
                                           int keys) const {
    if (map.blocks == nullptr) return {};
    const int last_query = block_of(first_query + queries - 1, map.query_size);
    const int begin_key = block_of(first_key, map.key_size);
    const int last_key = block_of(first_key + keys - 1, map.key_size);
    int query = block_of(first_query, map.query_size);
    SeenTile seen{of_block(query, begin_key), true};
#pragma unroll 1
    for (; query <= last_query && seen.alike; ++query) {
#pragma unroll 1
      for (int key = begin_key; key <= last_key; ++key) seen.alike &= of_block(query, key) == seen.by;
    }
    return seen;
  }

  // It is called, not inlined, because it takes two divisions, and blocks are seldom smaller than tiles.
  __device__ SELFATTN_CALLED Seen of_score(int32_t query, int32_t key) const {
    return of_block(block_of(query, map.query_size), block_of(key, map.key_size));
  }

 private:
  __device__ __forceinline__ Seen of_block(int query, int key) const {
    if (query >= map.query_blocks || key >= map.key_blocks) return Seen::kNone;
    return static_cast<Seen>(blocks_[query * map.stride[2] + key]);
  }
  // The division has 32 bits, like positions, because one of 64 bits takes several times as long.
  static __device__ __forceinline__ int block_of(int32_t position, int64_t size) {
    constexpr int64_t kMost = int64_t{1} << 31;
    return static_cast<int>(static_cast<uint32_t>(position) / static_cast<uint32_t>(smaller(size, kMost)));
  }

  const BlockMap& map;
  const uint8_t* const blocks_;
};

// The function on the scores of one head of a batch element, from query `first_query` on.
template <class T>
class FunctionTile {
 public:
  static constexpr bool kAny = true;

  __device__ __forceinline__ FunctionTile(const ScoreFunction& of, int64_t batch, int64_t head,
                                          int64_t first_query)
      : function(of),
        map_(of.map, batch, head),
        batch_(static_cast<int32_t>(of.first_batch + batch)),
        head_(static_cast<int32_t>(head)),
        first_query_(static_cast<int32_t>(first_query)) {}

  // Makes `first_key` column 0. Until see() is called, each score looks up its block of the map.
  __device__ __forceinline__ void move_to(int64_t first_key) {
    first_key_ = static_cast<int32_t>(first_key);
    seen_.alike = function.map.blocks == nullptr;
  }
  __device__ __forceinline__ void see(SeenTile seen) { seen_ = seen; }
  __device__ __forceinline__ SeenTile seen_tile(int rows, int columns) const {
    return map_.tile(first_query_, rows, first_key_, columns);
  }

  __device__ __forceinline__ bool has_map() const { return function.map.blocks != nullptr; }
  __device__ __forceinline__ bool shows(int row, int column) const {
    return seen(row, column) != Seen::kNone;
  }

  // The function's result for a score; -inf if the function or the map hides it.
  __device__ __forceinline__ T score(int row, int column, T given) const {
    const Seen by = seen(row, column);
    if (by == Seen::kNone) return -infinity<T>();
    return score_function::modified(function.arguments, by == Seen::kAll, batch_, head_, first_query_ + row,
                                    first_key_ + column, given);
  }
  // Whether an element is hidden whatever its score is. A score of 0 is tried, which is enough for functions
  // whose -inf does not depend on the score.
  __device__ __forceinline__ bool hides(int row, int column) const {
    return score(row, column, T(0)) == -infinity<T>();
  }
  // Turns the gradient of the function's result into that of `given`. The result is never -0.
  __device__ __forceinline__ T gradient(int row, int column, T given, T grad) const {
    return score_function::gradient(function.arguments, batch_, head_, first_query_ + row,
                                    first_key_ + column, given, grad) +
           T(0);
  }
  // The gradient of the element that load number `load` of the function has read, from the gradient of the
  // function's result.
  __device__ __forceinline__ score_function::CapturedPart<T> captured_part(int load, int row, int column,
                                                                           T given, T grad) const {
    return score_function::captured_part(function.arguments, load, batch_, head_, first_query_ + row,
                                         first_key_ + column, given, grad);
  }

 private:
  __device__ __forceinline__ Seen seen(int row, int column) const {
    return seen_.alike ? seen_.by : map_.of_score(first_query_ + row, first_key_ + column);
  }

  const ScoreFunction& function;
  const HeadMap map_;
  const int32_t batch_, head_, first_query_;
  int32_t first_key_ = 0;
  SeenTile seen_;
};

#else

template <class T>
class FunctionTile {
 public:
  static constexpr bool kAny = false;

  __device__ __forceinline__ FunctionTile(const ScoreFunction&, int64_t, int64_t, int64_t) {}
  __device__ __forceinline__ void move_to(int64_t) {}
  __device__ __forceinline__ void see(SeenTile) {}
  __device__ __forceinline__ SeenTile seen_tile(int, int) const { return {}; }
  __device__ __forceinline__ bool has_map() const { return false; }
  __device__ __forceinline__ bool shows(int, int) const { return true; }
  __device__ __forceinline__ T score(int, int, T given) const { return given; }
  __device__ __forceinline__ bool hides(int, int) const { return false; }
  __device__ __forceinline__ T gradient(int, int, T, T grad) const { return grad; }
};

#endif

// Which scores the map shows of these queries of a head and these keys.
__device__ __forceinline__ SeenTile seen_tile(const ScoreFunction& function, int64_t batch, int64_t head,
                                              int64_t first_query, int queries, int64_t first_key, int keys) {
  FunctionTile<float> tile(function, batch, head, first_query);
  tile.move_to(first_key);
  return tile.seen_tile(queries, keys);
}

}  // namespace selfattn::cuda
