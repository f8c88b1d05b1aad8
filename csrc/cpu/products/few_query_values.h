// Sums of value rows by the weights of very few queries; see few_query_rows.h.
#pragma once

#include "few_query_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Keys of a step, whose values are read more than once: few enough for the level-1 cache.
constexpr int64_t kValueStep = 32;

// The arguments of a product with values, besides the values. `visible` is laid out like the scores, and is 0
// where a key must be left out; see multiply_visible. A weight may stand for two keys.
template <class T, class Weight = T>
struct FewQueryValues {
  static constexpr int64_t kKeys = std::is_same<Weight, T>::value ? 1 : 2;

  const Weight* weights;  // [rows][ld], keys along a row
  const T* visible;       // nullable
  int64_t ld;
  int64_t value_dim;
  T* sums;          // [rows][ld_sums]
  int64_t ld_sums;  // at least value_dim in whole vectors

  FewQueryValues from(int64_t key) const {
    return {
        weights + key / kKeys, visible != nullptr ? visible + key : nullptr, ld, value_dim, sums, ld_sums};
  }
};

// Sums kVecs vectors of columns from `at` on for kRows rows. With kTail the last of them is the tail, whose
// fresh lanes count. With kListed the values are rows of a list.
template <class T, class Stored, int kRows, int kVecs, bool kTail, bool kListed>
SELFATTN_INLINE void few_query_value_tile(const FewQueryValues<T>& a, int64_t row,
                                          const FewQueryRows::Even& values, int64_t at,
                                          const RowTail<T, Stored>& tail) {
  using S = Simd<T>;
  using Element = typename Stored::Element;
  constexpr auto is_tail = [](int v) { return kTail && v == kVecs - 1; };
  const auto column = [&](int v) { return is_tail(v) ? tail.at : at + v * S::kWidth; };
  T* sums_at = a.sums + row * a.ld_sums;
  typename S::Vec sums[kRows][kVecs];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = S::load(sums_at + r * a.ld_sums + column(v));
  }
  const T* weights = a.weights + row * a.ld;
  const T* visible = kRows == 1 && a.visible != nullptr ? a.visible + row * a.ld : nullptr;
  constexpr int64_t kBytes = sizeof(Element);
  const RowRun soon_rows = values.soon_columns(at * kBytes, kVecs * S::kWidth * kBytes, a.value_dim * kBytes);
  const char *value_row = values.rows.first, *soon_row = soon_rows.first;
  for (int64_t j = 0; j < values.rows.rows; ++j) {
    if constexpr (kListed) {
      value_row = values.list.row[j];
      soon_row = values.list.soon(j) + at * kBytes;
    }
    const auto* value = reinterpret_cast<const Element*>(value_row);
    const auto* soon = reinterpret_cast<const Element*>(soon_row);
    value_row += values.rows.step;
    soon_row += soon_rows.step;
    if (kRows == 1 && visible != nullptr && visible[j] == T(0)) continue;
    typename S::Vec x[kVecs];
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      if (is_tail(v)) {
        x[v] = tail.load(value);
      } else {
        x[v] = Stored::load(value + at + v * S::kWidth);
        if (v % kVecsOfLine<Stored> == 0) fetch_ahead(soon + v * S::kWidth);
      }
    }
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto weight = S::set(weights[r * a.ld + j]);
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = S::fma(weight, x[v], sums[r][v]);
    }
  }
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      T* to = sums_at + r * a.ld_sums + column(v);
      S::store(to, is_tail(v) ? tail.chosen(sums[r][v], S::load(to)) : sums[r][v]);
    }
  }
}

// Adds all columns of some rows, for few_query_value_steps.
template <class T, class Stored>
struct FewQueryColumns {
  RowTail<T, Stored> tail;

  explicit FewQueryColumns(int64_t value_dim) : tail(value_dim) {}

  static constexpr int64_t kElementBytes = sizeof(typename Stored::Element);
  static constexpr int vecs_of(int rows) { return smaller(kFewQueryTile<T> / rows, 8); }
  static constexpr int64_t columns_of(int rows) { return vecs_of(rows) * Simd<T>::kWidth; }

  template <int kRows, int kVecs, bool kListed>
  SELFATTN_INLINE int64_t tiles(const FewQueryValues<T>& a, int64_t row, const FewQueryRows::Even& values,
                                int64_t at) const {
    for (; at + kVecs * Simd<T>::kWidth <= tail.whole; at += kVecs * Simd<T>::kWidth) {
      few_query_value_tile<T, Stored, kRows, kVecs, false, kListed>(a, row, values, at, tail);
    }
    return at;
  }
  template <int kRows, bool kListed = false>
  void add(const FewQueryValues<T>& a, int64_t row, const FewQueryRows::Even& values) const {
    constexpr int kVecs = vecs_of(kRows);
    int64_t at = tiles<kRows, kVecs, kListed>(a, row, values, 0);
    if constexpr (kVecs > 4) at = tiles<kRows, 4, kListed>(a, row, values, at);
    if constexpr (kVecs > 2) at = tiles<kRows, 2, kListed>(a, row, values, at);
    if constexpr (kVecs > 1) {
      if (at < tail.whole && tail.any()) {
        // Both at once, because a key waits for the sums of the one before.
        return few_query_value_tile<T, Stored, kRows, 2, true, kListed>(a, row, values, at, tail);
      }
      at = tiles<kRows, 1, kListed>(a, row, values, at);
    }
    if (tail.any()) few_query_value_tile<T, Stored, kRows, 1, true, kListed>(a, row, values, at, tail);
  }
};

// Multiplies a step of keys by rows of weights, at most `most` at a time.
template <bool kListed, class Columns, class Values>
void add_value_rows(const Columns& columns, const Values& a, int64_t rows, int64_t most,
                    const FewQueryRows::Even& some) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = smaller(rows - row, most);
    if (left >= 8) {
      columns.template add<8, kListed>(a, row, some);
      row += 8;
    } else if (left >= 4) {
      columns.template add<4, kListed>(a, row, some);
      row += 4;
    } else if (left >= 2) {
      columns.template add<2, kListed>(a, row, some);
      row += 2;
    } else {
      columns.template add<1, kListed>(a, row, some);
      row += 1;
    }
  }
}

// Multiplies a step of keys at a time by rows of weights, in groups of up to eight: further columns and
// groups find the step's values in the level-1 cache. Without long runs, memory is read fastest in its own
// order, so there a group has as many rows as leave registers for a whole row of values, but at least two.
template <bool kListed, class Columns, class Values>
void few_query_value_steps(const Columns& columns, Values a, int64_t rows, FewQueryRows values) {
  const int64_t row_bytes = a.value_dim * Columns::kElementBytes;
  int64_t most = 8, step = kValueStep;
  if (values.in_long_runs(row_bytes)) {
    // Rows that are prefetched meanwhile lie beyond the step.
    step = larger(smaller(rows_ahead(row_bytes) / 2 * 2, kValueStep), 2);
  } else {
    while (most > 2 && Columns::columns_of(static_cast<int>(most)) < a.value_dim) most /= 2;
  }
  if (a.visible != nullptr) most = 1;  // keys are left out for one row at a time
  const bool once = rows <= most && a.value_dim <= Columns::columns_of(static_cast<int>(most));
  while (values.count > 0) {
    const FewQueryRows::Even some = values.take_even(once ? values.count : step);
    add_value_rows<kListed>(columns, a, rows, most, some);
    a = a.from(some.rows.rows);
  }
}

// sums[row] += sum over keys of weights[row][key] * value[key], for at least one key.
template <class T, bool kListed = false>
SELFATTN_OUT_OF_LINE void few_query_values(const FewQueryValues<T>& a, int64_t rows,
                                           const FewQueryRows& values) {
  if constexpr (sizeof(T) == 4) {
    if (values.dtype == DType::kBFloat16) {
      return few_query_value_steps<kListed>(FewQueryColumns<T, StoredBFloat16<T>>(a.value_dim), a, rows,
                                            values);
    }
    if (values.dtype == DType::kFloat16) {
      return few_query_value_steps<kListed>(FewQueryColumns<T, StoredFloat16<T>>(a.value_dim), a, rows,
                                            values);
    }
  }
  few_query_value_steps<kListed>(FewQueryColumns<T, StoredAsT<T>>(a.value_dim), a, rows, values);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
