// Outer products of very few queries: what their rows add to the row of every key, as dV = P^T dO and dK =
// dS^T Q. All rows that reach a key are here at once, so that a result is stored in its own type as soon as
// its sum is complete, and nothing is kept in between.
#pragma once

#include "few_query_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The rows that are multiplied, and their weights.
template <class T>
struct FewQueryOuter {
  const T* weights;  // [rows][ld], keys along a row
  const T* visible;  // nullable, laid out like the weights; 0 where a key must be left out
  int64_t ld;
  const T* rows;  // [count][stride], padded with zeros to whole vectors
  int64_t count, stride;
};

// The results go to rows of `columns` neighbouring elements.
struct OuterResult {
  void* first;
  DType dtype;
  int64_t stride, columns;
};

// Adds up kVecs vectors of key j's result from column e on; `zeros` become NaN where a sum is not finite.
template <class T, int kVecs>
SELFATTN_INLINE void outer_sums(const FewQueryOuter<T>& a, int64_t j, int64_t e,
                                typename Simd<T>::Vec (&sums)[kVecs], typename Simd<T>::Vec (&zeros)[4]) {
  using S = Simd<T>;
  SELFATTN_UNROLL
  for (int v = 0; v < kVecs; ++v) sums[v] = S::set(T(0));
  const T* row = a.rows + e;
  for (int64_t r = 0; r < a.count; ++r, row += a.stride) {
    if (a.visible != nullptr && a.visible[r * a.ld + j] == T(0)) continue;
    const auto weight = S::set(a.weights[r * a.ld + j]);
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[v] = S::fma(weight, S::load(row + v * S::kWidth), sums[v]);
  }
  SELFATTN_UNROLL
  for (int v = 0; v < kVecs; ++v) zeros[v] = S::fma(sums[v], S::set(T(0)), zeros[v]);
}

// `a` is a copy, because a store might change what a reference refers to.
template <class T, class Stored>
bool few_query_outer_as(const FewQueryOuter<T> a, int64_t keys, const OuterResult to) {
  using S = Simd<T>;
  const int64_t whole = to.columns / S::kWidth * S::kWidth;
  auto* row = static_cast<typename Stored::Element*>(to.first);
  typename S::Vec zeros[4] = {S::set(T(0)), S::set(T(0)), S::set(T(0)), S::set(T(0))};
  for (int64_t j = 0; j < keys; ++j, row += to.stride) {
    int64_t e = 0;
    for (; e + 4 * S::kWidth <= whole; e += 4 * S::kWidth) {
      typename S::Vec sums[4];
      outer_sums<T, 4>(a, j, e, sums, zeros);
      SELFATTN_UNROLL
      for (int v = 0; v < 4; ++v) Stored::store(row + e + v * S::kWidth, sums[v]);
    }
    for (; e < to.columns; e += S::kWidth) {
      typename S::Vec sums[1];
      outer_sums<T, 1>(a, j, e, sums, zeros);
      if (e < whole) {
        Stored::store(row + e, sums[0]);
      } else {
        store_row<T>(row + e, Stored::kDType, to.columns - e, sums[0]);
      }
    }
  }
  return all_zero<T>(S::add(S::add(zeros[0], zeros[1]), S::add(zeros[2], zeros[3])));
}

// Stores the results of `keys` keys; returns whether all of them are finite.
template <class T>
SELFATTN_OUT_OF_LINE bool few_query_outer(const FewQueryOuter<T>& a, int64_t keys, const OuterResult& to) {
  if constexpr (sizeof(T) == 4) {
    if (to.dtype == DType::kBFloat16) return few_query_outer_as<T, StoredBFloat16<T>>(a, keys, to);
    if (to.dtype == DType::kFloat16) return few_query_outer_as<T, StoredFloat16<T>>(a, keys, to);
  }
  return few_query_outer_as<T, StoredAsT<T>>(a, keys, to);
}

// Adds kVecs vectors of columns from e on to the row of each key, for kRows rows, which stay in registers.
template <class T, int kRows, int kVecs>
SELFATTN_INLINE void add_outer_columns(const FewQueryOuter<T>& a, int64_t row, int64_t keys, T* const* to,
                                       int64_t e) {
  using S = Simd<T>;
  constexpr int64_t kAhead = 8;
  typename S::Vec rows[kRows][kVecs];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) rows[r][v] = S::load(a.rows + (row + r) * a.stride + e + v * S::kWidth);
  }
  const T *weights = a.weights + row * a.ld,
          *visible = a.visible != nullptr ? a.visible + row * a.ld : nullptr;
  for (int64_t j = 0; j < keys; ++j) {
    prefetch_block(to[smaller(j + kAhead, keys - 1)] + e, 0, 1, kVecs * S::kWidth * sizeof(T));
    typename S::Vec sums[kVecs];
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[v] = S::load(to[j] + e + v * S::kWidth);
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (visible != nullptr && visible[r * a.ld + j] == T(0)) continue;
      const auto weight = S::set(weights[r * a.ld + j]);
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[v] = S::fma(weight, rows[r][v], sums[v]);
    }
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) S::store(to[j] + e + v * S::kWidth, sums[v]);
  }
}

template <class T, int kRows>
void add_outer_rows(const FewQueryOuter<T>& a, int64_t row, int64_t keys, T* const* to, int64_t padded) {
  constexpr int kVecs = kFewQueryTile<T> / kRows;
  constexpr int64_t kColumns = kVecs * Simd<T>::kWidth;
  int64_t e = 0;
  for (; e + kColumns <= padded; e += kColumns) add_outer_columns<T, kRows, kVecs>(a, row, keys, to, e);
  for (; e < padded; e += Simd<T>::kWidth) add_outer_columns<T, kRows, 1>(a, row, keys, to, e);
}

// Adds what the rows add to `keys` keys, whose sums begin at to[key] and have `padded` columns, whole
// vectors.
template <class T>
SELFATTN_OUT_OF_LINE void add_few_query_outer(const FewQueryOuter<T>& a, int64_t keys, T* const* to,
                                              int64_t padded) {
  int64_t row = 0;
  for (; row + 4 <= a.count; row += 4) add_outer_rows<T, 4>(a, row, keys, to, padded);
  if (row + 2 <= a.count) {
    add_outer_rows<T, 2>(a, row, keys, to, padded);
    row += 2;
  }
  if (row < a.count) add_outer_rows<T, 1>(a, row, keys, to, padded);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
