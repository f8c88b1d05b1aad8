// The tiles of queries and keys that a block of the backward goes through, and its shared memory.
//
// ds, the gradient of a score, is summed over keys for queries; over queries (of all heads that share the
// keys) for keys and values; over the dimensions that share a mask for the mask; and for the tensors that a
// function of scores reads, as the function reads them. These are four sides of one kernel: a block owns the
// sums, and goes through the tiles that are added to them.
#pragma once

#include <algorithm>

#include "../../core/visible_range.h"
#include "../common/grid.cuh"
#include "../common/sequence.cuh"
#include "load.cuh"

namespace selfattn::cuda::simt {

enum class Side { kQuery, kKey, kMask, kCaptured };

// A tile's rows belong to the block. For masks and captured tensors they are queries.
template <Side kSide>
constexpr bool kRowsAreKeys = kSide == Side::kKey;
// Whether ds becomes the gradient of q·k, rather than of the function's result.
template <Side kSide>
constexpr bool kOfProducts = kSide == Side::kQuery || kSide == Side::kKey;
template <class T, Side kSide>
constexpr int kTileQueries = kRowsAreKeys<kSide> ? kColumns : kRows<T>;
template <class T, Side kSide>
constexpr int kTileKeys = kRowsAreKeys<kSide> ? kRows<T> : kColumns;

// Positions first, first + step, ... below end.
struct Span {
  int64_t first, end;

  static __host__ __device__ __forceinline__ Span only(int64_t at) { return {at, at + 1}; }
  // The positions begin at a multiple of `step`.
  static __host__ __device__ __forceinline__ Span covering(int64_t begin, int64_t end, int step) {
    return {begin / step * step, end};
  }

  __host__ __device__ __forceinline__ int64_t count(int step) const {
    return end > first ? divide_up(end - first, step) : 0;
  }
};

// A block's way through its tiles: all keys of a query, all queries of a head, all heads, all batches. It
// lies in shared memory, where one thread moves it on between two tiles, so that it takes no registers while
// sums are computed.
template <DType kDType, Side kSide>
struct GradientPlan {
  using T = typename Element<kDType>::Accumulation;
  static constexpr int kQueries = kTileQueries<T, kSide>, kKeys = kTileKeys<T, kSide>;

  Span batches, heads, queries, keys;
  Sequence sequence;                                              // of this tile's batch
  int64_t left;                                                   // remaining tiles, with this one
  int64_t head, first_query, first_key;                           // of this tile
  int first_panel;                                                // of the block's results; see GradientPanel
  RowSource<kDType> query_rows, grad_rows, key_rows, value_rows;  // of this batch and head

  __device__ __forceinline__ GradientPlan(const AttentionParams& p, const BackwardArguments& a,
                                          Span of_batches, Span of_heads, Span of_queries, Span of_keys)
      : batches(of_batches),
        heads(of_heads),
        queries(of_queries),
        keys(of_keys),
        sequence(sequence_of(p, batches.first)),
        left(batches.count(1) * heads.count(1) * queries.count(kQueries) * keys.count(kKeys)),
        head(heads.first),
        first_query(queries.first),
        first_key(keys.first),
        first_panel(0),
        query_rows(p.query, sequence.query_batch, head, sequence.first_query),
        grad_rows(a.grad_out, sequence.query_batch, head, sequence.first_query),
        key_rows(p.key, sequence.key_batch, p.kv_head(head), sequence.first_key),
        value_rows(p.value, sequence.key_batch, p.kv_head(head), sequence.first_key) {}

  __device__ __forceinline__ bool done() const { return left <= 0; }

  // Moves to the next tile, visible or not.
  __device__ __forceinline__ void step(const AttentionParams& p, const BackwardArguments& a) {
    --left;
    first_key += kKeys;
    if (first_key < keys.end) return;
    first_key = keys.first;
    first_query += kQueries;
    if (first_query < queries.end) return;
    first_query = queries.first;
    int64_t batch = sequence.batch;
    if (++head == heads.end) {
      head = heads.first;
      ++batch;
    }
    if (left > 0) find_rows(p, a, batch);
  }

  // Skips so many tiles, counted from the first one.
  __device__ __forceinline__ void skip(const AttentionParams& p, const BackwardArguments& a, int64_t tiles) {
    left -= tiles;
    const int64_t of_key = keys.count(kKeys), of_query = queries.count(kQueries), of_head = heads.count(1);
    first_key = keys.first + tiles % of_key * kKeys;
    tiles /= of_key;
    first_query = queries.first + tiles % of_query * kQueries;
    tiles /= of_query;
    head = heads.first + tiles % of_head;
    if (left > 0) find_rows(p, a, batches.first + tiles / of_head);
  }

  // Whether any of the tile's queries sees any of its keys by position. The sequence may end before the tile.
  __device__ __forceinline__ bool in_window(const AttentionParams& p) const {
    if (first_query >= sequence.queries) return false;
    const int64_t last = first_query + smaller(sequence.queries - first_query, kQueries) - 1;
    const KeyRange visible = visible_keys(positions_of(p, sequence), first_query, last);
    return first_key < visible.end && first_key + kKeys > visible.begin;
  }

 private:
  __device__ __forceinline__ void find_rows(const AttentionParams& p, const BackwardArguments& a,
                                            int64_t batch) {
    const int64_t kv_head = p.kv_head(head);
    sequence = sequence_of(p, batch);
    query_rows = RowSource<kDType>(p.query, sequence.query_batch, head, sequence.first_query);
    grad_rows = RowSource<kDType>(a.grad_out, sequence.query_batch, head, sequence.first_query);
    key_rows = RowSource<kDType>(p.key, sequence.key_batch, kv_head, sequence.first_key);
    value_rows = RowSource<kDType>(p.value, sequence.key_batch, kv_head, sequence.first_key);
  }
};

// A block's shared memory.
template <DType kDType, Side kSide>
struct GradientShared {
  using T = typename Element<kDType>::Accumulation;
  using Plan = GradientPlan<kDType, kSide>;
  static constexpr int kPlanBytes = 512;
  static_assert(sizeof(Plan) <= kPlanBytes, "panels begin behind the plan");
  static_assert(kRowPanel<T> <= kWeightPanel<T>, "the rows of products lie where ds follows");
  static constexpr size_t kPanelsEnd =
      kPlanBytes + static_cast<size_t>(kRows<T> + kColumnPanel<T> + 2 * kWeightPanel<T>) * sizeof(T);
  static constexpr int kLines = std::max(kRows<T>, kColumns);
  static constexpr size_t kBytes = kPanelsEnd + (kSide == Side::kMask ? kLines * sizeof(double) : 0);
  static_assert(kPanelsEnd % sizeof(double) == 0, "totals are aligned");

  Plan* plan;
  T* row_sums;  // kRows: sums of ds times distance
  T* columns;   // kColumnPanel
  T* weights;   // kWeightPanel: weights after dropout; for captured tensors the scores given to the function
  T* score_grads;   // kWeightPanel: ds, or the gradient of q·k if kOfProducts
  T* product_rows;  // kRowPanel, in the same place: both products are done when ds is stored
  double* totals;   // kLines, of a mask: see ../mask/line_totals.cuh

  __device__ __forceinline__ explicit GradientShared(unsigned char* memory)
      : plan(reinterpret_cast<Plan*>(memory)),
        row_sums(reinterpret_cast<T*>(memory + kPlanBytes)),
        columns(row_sums + kRows<T>),
        weights(columns + kColumnPanel<T>),
        score_grads(weights + kWeightPanel<T>),
        product_rows(score_grads),
        totals(reinterpret_cast<double*>(memory + kPanelsEnd)) {}
};

// Moves to the next tile of which the window shows anything. All threads must call it.
template <DType kDType, Side kSide>
__device__ __forceinline__ void move_on(GradientPlan<kDType, kSide>& plan, const AttentionParams& p,
                                        const BackwardArguments& a) {
  __syncthreads();  // all threads have finished with this tile
  if (threadIdx.x == 0) {
    do {
      plan.step(p, a);
    } while (!plan.done() && !plan.in_window(p));
  }
  __syncthreads();
}

}  // namespace selfattn::cuda::simt
