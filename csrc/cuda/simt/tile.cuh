// The shape of a block's work, and the layout of its operands in shared memory.
//
// A block computes kRows x kColumns numbers at a time: scores of queries and keys, or outputs. Its threads
// form a grid of kThreadRows x kThreadColumns. Each owns kRowsPerThread x kColumnsPerThread numbers in
// registers, so that one step of a product costs two or three 16-byte reads of shared memory for 32 (float)
// or 16 (double) multiply-adds. The threads that share rows are half a warp, so that softmax needs only
// shuffles.
#pragma once

#include "../common/device.cuh"

namespace selfattn::cuda::simt {

constexpr int kThreads = 128;
constexpr int kThreadColumns = 16;
constexpr int kThreadRows = kThreads / kThreadColumns;

// The number of elements of T that are moved at once, which are 16 bytes.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
constexpr int kRowsPerThread = 32 / static_cast<int>(sizeof(T));
constexpr int kColumnsPerThread = 4;

template <class T>
constexpr int kRows = kThreadRows * kRowsPerThread<T>;
constexpr int kColumns = kThreadColumns * kColumnsPerThread;

// The steps of a product between two loads of shared memory: dimensions of a head, or keys.
template <class T>
constexpr int kDepth = 128 / static_cast<int>(sizeof(T));

// A block computes kOutputPanels times kColumns columns of the values, as many as registers hold. Wider
// values are distributed among blocks, each of which computes the scores again.
constexpr int kOutputPanels = 2;
constexpr int kOutputColumns = kOutputPanels * kColumns;

// The thread's part of a kRows x kColumns result.
template <class T>
using Fragment = T[kRowsPerThread<T>][kColumnsPerThread];

// Calls body(r, c) for each number of a fragment.
template <class T, class Body>
__device__ __forceinline__ void for_each_number(const Body& body) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) body(r, c);
  }
}

__device__ __forceinline__ int thread_row() { return static_cast<int>(threadIdx.x) / kThreadColumns; }
__device__ __forceinline__ int thread_column() { return static_cast<int>(threadIdx.x) % kThreadColumns; }

// The row and column of the thread's fragment element. Rows are neighbours. Columns are neighbours within a
// vector; vectors of the kThreadColumns threads alternate, so that the threads read neighbouring memory.
template <class T>
__device__ __forceinline__ int fragment_row(int r) {
  return thread_row() * kRowsPerThread<T> + r;
}
template <class T>
__device__ __forceinline__ int fragment_column(int c) {
  return (c / kVector<T> * kThreadColumns + thread_column()) * kVector<T> + c % kVector<T>;
}

// The head and the query of a block's row. The head is counted from the block's first.
struct HeadRow {
  int head;
  int64_t query;
};

// Rows that are neighbouring queries of one head.
struct UnfoldedRows {
  int64_t first_query;

  __device__ __forceinline__ HeadRow of(int row) const { return {0, first_query + row}; }
};

// Rows that are all queries of one head, then all of the next: see folded_rows.cuh.
struct FoldedRows {
  int queries;  // of each head, at least 1

  __device__ __forceinline__ HeadRow of(int row) const { return {row / queries, row % queries}; }
};

// Whether the warp has any row below `rows`; warps without one only help to load. The lanes vote, so that the
// compiler knows that they agree: shuffles in code that might diverge cost a call each.
template <class T>
__device__ __forceinline__ bool warp_has_rows(int rows) {
  return __any_sync(kWholeWarp, thread_row() * kRowsPerThread<T> < rows) != 0;
}

// A panel is an operand of a product in shared memory: element (k, x) for step k and row or column x, of
// kWidth in all. A gap of one vector follows every kVector steps. Without it, transposing loads, which write
// neighbouring steps, and the weights, which a half-warp writes for 16 keys, would conflict in one bank.
// Indices are still sums, so that unrolled code finds elements at constant offsets from one register.
template <class T, int kWidth>
__host__ __device__ __forceinline__ constexpr int panel_index(int k, int x) {
  return k * kWidth + k / kVector<T> * kVector<T> + x;
}

// The elements of a panel with so many steps, a multiple of kVector.
template <int kWidth>
__host__ __device__ constexpr int panel_size(int steps) {
  return steps * (kWidth + 1);
}
template <class T>
constexpr int kRowPanel = panel_size<kRows<T>>(kDepth<T>);
template <class T>
constexpr int kColumnPanel = panel_size<kColumns>(kDepth<T>);
template <class T>
constexpr int kWeightPanel = panel_size<kRows<T>>(kColumns);

}  // namespace selfattn::cuda::simt
