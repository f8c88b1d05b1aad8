// Steps from a tile of products to final scores and dropout, which forward and weights share.
#pragma once

#include "../common/dropout.cuh"
#include "../common/score_tile.cuh"
#include "product.cuh"

namespace selfattn::cuda::simt {

// The sum of the numbers of all threads of a row.
template <class T>
__device__ __forceinline__ T sum_of_row(T x) {
#pragma unroll
  for (int lanes = kThreadColumns / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kWholeWarp, x, lanes);
  return x;
}

// The largest number among the threads of a row.
template <class T>
__device__ __forceinline__ T largest_of_row(T x) {
#pragma unroll
  for (int lanes = kThreadColumns / 2; lanes > 0; lanes /= 2) {
    x = larger(x, __shfl_xor_sync(kWholeWarp, x, lanes));
  }
  return x;
}

// The index of the thread's element (r, c) in a panel of weights, whose steps are keys.
template <class T>
__device__ __forceinline__ int weight_index(int r, int c) {
  return panel_index<T, kRows<T>>(fragment_column<T>(c), fragment_row<T>(r));
}

template <class T>
__device__ __forceinline__ void put_fragment(T* panel, const Fragment<T>& fragment) {
#pragma unroll
  for (int c = 0; c < kColumnsPerThread; ++c) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; r += kVector<T>) {
      Vector<T> v;
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) v.element[i] = fragment[r + i][c];
      *reinterpret_cast<Vector<T>*>(panel + weight_index<T>(r, c)) = v;
    }
  }
}

template <class T>
__device__ __forceinline__ void get_fragment(const T* panel, Fragment<T>& fragment) {
#pragma unroll
  for (int c = 0; c < kColumnsPerThread; ++c) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; r += kVector<T>) {
      const Vector<T> v = *reinterpret_cast<const Vector<T>*>(panel + weight_index<T>(r, c));
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) fragment[r + i][c] = v.element[i];
    }
  }
}

// Turns dot products into final scores, which are -inf for hidden ones. Options other than a scale are
// applied in `panel`, one row after the other, because code that is unrolled over the registers of a fragment
// would be long and spill them.
template <class Tile, class T>
__device__ __forceinline__ void finish_scores(const Tile& tile, T* panel, Fragment<T>& s) {
  if (tile.is_bare() && tile.window_covers(kRows<T>, kColumns)) {
    for_each_number<T>([&](int r, int c) { s[r][c] = tile.scaled(s[r][c]); });
    return;
  }
  put_fragment<T>(panel, s);
#pragma unroll 1
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      T& score = panel[weight_index<T>(r, c)];
      score = tile.score(fragment_row<T>(r), fragment_column<T>(c), score);
    }
  }
  get_fragment<T>(panel, s);
}

// Whether any of the thread's elements is visible.
template <class T, class Tile>
__device__ __forceinline__ bool sees_any(const Tile& tile) {
  bool any = false;
#pragma unroll 1
  for (int r = 0; r < kRowsPerThread<T> && !any; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      const int row = fragment_row<T>(r), column = fragment_column<T>(c);
      any = any || (tile.window_shows(row, column) && tile.mask_shows(row, column));
    }
  }
  return any;
}

// Multiplies the thread's weights by 0 or 1/(1 - probability). All keys of a vector belong to the same four.
template <class T, class Rows>
__device__ __forceinline__ void drop(const DropoutPattern<T>& dropout, const Rows& rows, int64_t first_key,
                                     T* panel) {
#pragma unroll 1
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    const HeadRow at = rows.of(fragment_row<T>(r));
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; c += kVector<T>) {
      const int64_t key = first_key + fragment_column<T>(c);
      const Philox4 words = dropout.words(at.query, key, at.head);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        panel[weight_index<T>(r, c + i)] *= dropout.factor(words, key + i);
      }
    }
  }
}

}  // namespace selfattn::cuda::simt
