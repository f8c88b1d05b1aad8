// Products for very few queries, as in generating text one token at a time. Lanes that run over queries would
// be empty, so here they run over the head dim: a score is a dot product, an output row is a sum of scaled
// value rows. Keys and values are read where they lie, in their own type, and converted in registers; what is
// loaded serves up to eight rows of queries, those of all heads that read it.
//
// Every sum has one order, that of thin_scores and thin_values for a single row: it depends on the head dim
// alone, not on how many rows or keys share a tile or in which type the keys are stored. A row's result is
// then the same in any group, and a pass that computes a score again gets the forward's very bits.
#pragma once

#include "rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Up to here a dot product per query beats a vector of mostly empty lanes.
constexpr int64_t kThinQueries = 4;

// Accumulators of a tile: what the registers hold beside its operands. At least a vector's width of them.
template <class T>
constexpr int kThinTile = Simd<T>::kTileRows == 8 ? 16 : 8;

// Elements in memory, of which load() makes a vector of T.
template <class T>
struct StoredPlain {
  using Element = T;
  static constexpr DType kDType = dtype_of<T>();
  static SELFATTN_INLINE typename Simd<T>::Vec load(const T* p) { return Simd<T>::load(p); }
};
template <class T>
struct StoredBFloat16 {
  using Element = uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  static SELFATTN_INLINE typename Simd<T>::Vec load(const uint16_t* p) { return Simd<T>::load_bfloat16(p); }
};
template <class T>
struct StoredFloat16 {
  using Element = uint16_t;
  static constexpr DType kDType = DType::kFloat16;
  static SELFATTN_INLINE typename Simd<T>::Vec load(const uint16_t* p) { return Simd<T>::load_float16(p); }
};

// Vectors that a cache line of elements makes.
template <class T, class Stored>
constexpr int kVecsOfLine = 64 / (Simd<T>::kWidth * static_cast<int>(sizeof(typename Stored::Element)));

// How far ahead of its use a line is asked for: about what is under way between memory and a core at once.
constexpr int64_t kBytesAhead = 8192;

// The same in rows of which `size` elements are read one row after the other; shorter ones than a line are
// not asked for.
constexpr int64_t kMostRowsAhead = kBytesAhead / 64;
template <class Stored>
SELFATTN_INLINE int64_t rows_ahead(int64_t size) {
  const int64_t bytes = size * static_cast<int64_t>(sizeof(typename Stored::Element));
  return bytes <= 64 ? kMostRowsAhead : bytes < kBytesAhead ? kBytesAhead / bytes : 1;
}

// Reads nothing, so that the address may lie past the tensor's end.
SELFATTN_INLINE void fetch_ahead(const void* line) { __builtin_prefetch(line); }

// Where keys or values lie: rows a stride apart, or listed one by one. While a row is read, others are asked
// for ahead of their use: those further on, or what a second list says. Any address will do for that.
template <class Stored>
struct StridedRows {
  using Type = Stored;
  using Element = typename Stored::Element;
  const Element* first;
  int64_t stride;

  SELFATTN_INLINE const Element* row(int64_t j) const { return first + j * stride; }
  SELFATTN_INLINE const Element* soon(int64_t j, int64_t ahead) const { return row(j + ahead); }
  // Of columns that start at `at`: after the last of `count` rows follow those of `next`, if it is not 0.
  SELFATTN_INLINE const Element* soon(int64_t j, int64_t ahead, int64_t count, int64_t at,
                                      int64_t next) const {
    return j + ahead < count ? row(j + ahead) + at : row(j + ahead - (next > 0 ? count : 0)) + next;
  }
};
template <class Stored>
struct ListedRows {
  using Type = Stored;
  using Element = typename Stored::Element;
  const char *const *address, *const *next;

  SELFATTN_INLINE const Element* row(int64_t j) const { return reinterpret_cast<const Element*>(address[j]); }
  SELFATTN_INLINE const Element* soon(int64_t j, int64_t) const {
    return reinterpret_cast<const Element*>(next[j]);
  }
  SELFATTN_INLINE const Element* soon(int64_t j, int64_t, int64_t, int64_t at, int64_t) const {
    return reinterpret_cast<const Element*>(next[j]) + at;
  }
};

// The same before the type of the elements is known.
struct ThinRows {
  DType dtype;
  const void* first;
  int64_t stride;
  const char* const* address;  // nullable; otherwise listed
  const char* const* next;     // with address
};

template <class Stored>
SELFATTN_INLINE StridedRows<Stored> strided_rows(const ThinRows& rows) {
  return {static_cast<const typename Stored::Element*>(rows.first), rows.stride};
}
template <class Stored>
SELFATTN_INLINE ListedRows<Stored> listed_rows(const ThinRows& rows) {
  return {rows.address, rows.next};
}

// How rows of n elements fall into vectors: `whole` elements in whole ones, and a last one that is shifted
// back to end with the row, so that nothing outside the row is read. Its lanes that repeat earlier elements
// are not `fresh`. A row shorter than a vector is padded with zeros instead.
template <class T>
struct RowTail {
  using S = Simd<T>;
  int64_t whole, n, at;
  typename S::Mask fresh;

  explicit SELFATTN_INLINE RowTail(int64_t size)
      : whole(size / S::kWidth * S::kWidth), n(size), at(size < S::kWidth ? 0 : size - S::kWidth) {
    T index[S::kWidth];
    for (int i = 0; i < S::kWidth; ++i) index[i] = static_cast<T>(i);
    fresh = S::less(S::set(static_cast<T>(whole - at) - T(0.5)), S::load(index));
  }
  SELFATTN_INLINE bool any() const { return whole < n; }
  template <class Stored>
  SELFATTN_INLINE typename S::Vec load(const typename Stored::Element* row) const {
    return n < S::kWidth ? load_row<T>(row, Stored::kDType, n) : Stored::load(row + at);
  }
};

// In place: lane i of sums[0] becomes the sum over the lanes of sums[i], always as the same tree. A transpose
// by halves (see rows.h) that adds as soon as two halves are there.
template <class T, int kHalf>
SELFATTN_INLINE void sum_lanes(typename Simd<T>::Vec* sums) {
  using S = Simd<T>;
  SELFATTN_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    sums[i] =
        S::add(S::interleave_low(sums[i], sums[i + kHalf]), S::interleave_high(sums[i], sums[i + kHalf]));
  }
  if constexpr (kHalf > 1) sum_lanes<T, kHalf / 2>(sums);
}

// One vector's multiply-adds of thin_dots.
template <class T, class Stored, int kRows, int kKeys, int kStride>
SELFATTN_INLINE void thin_dots_step(const T* query, int64_t padded,
                                    const typename Stored::Element* const* keys, int64_t e,
                                    typename Simd<T>::Vec* sums) {
  using S = Simd<T>;
  typename S::Vec k[kKeys];
  SELFATTN_UNROLL
  for (int j = 0; j < kKeys; ++j) k[j] = Stored::load(keys[j] + e);
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto q = S::load(query + r * padded + e);
    SELFATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) sums[r * kStride + j] = S::fma(k[j], q, sums[r * kStride + j]);
  }
}

// The dot products of kRows rows of `query` with kKeys rows of `keys` into sums[row * kStride + key]. Lines
// of `soon` are asked for meanwhile.
template <class T, class Stored, int kRows, int kKeys, int kStride>
SELFATTN_INLINE void thin_dots(const T* query, int64_t padded, const typename Stored::Element* const* keys,
                               const typename Stored::Element* const* soon, const RowTail<T>& tail,
                               typename Simd<T>::Vec* sums) {
  using S = Simd<T>;
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) sums[r * kStride + j] = S::set(T(0));
  }
  constexpr int64_t kLine = kVecsOfLine<T, Stored> * S::kWidth;
  int64_t e = 0;
  for (; e + kLine <= tail.whole; e += kLine) {
    SELFATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) fetch_ahead(soon[j] + e);
    SELFATTN_UNROLL
    for (int v = 0; v < kVecsOfLine<T, Stored>; ++v) {
      thin_dots_step<T, Stored, kRows, kKeys, kStride>(query, padded, keys, e + v * S::kWidth, sums);
    }
  }
  for (; e < tail.whole; e += S::kWidth) {
    thin_dots_step<T, Stored, kRows, kKeys, kStride>(query, padded, keys, e, sums);
  }
  if (!tail.any()) return;
  SELFATTN_UNROLL
  for (int j = 0; j < kKeys; ++j) {
    const auto k = tail.template load<Stored>(keys[j]);
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      // Chosen afterwards: a zero in place of a repeated element would make NaN of an infinite factor.
      auto& sum = sums[r * kStride + j];
      sum = S::select(tail.fresh, S::fma(k, S::load(query + r * padded + tail.at), sum), sum);
    }
  }
}

// kRows rows of scores against `count` keys; see thin_scores.
template <class T, int kRows, class Rows>
void thin_score_rows(const T* query, const Rows keys, int64_t count, int64_t head_dim, T* s, int64_t row_step,
                     int64_t key_step) {
  using S = Simd<T>;
  using Stored = typename Rows::Type;
  constexpr int kTile = kThinTile<T>, kKeys = kTile / kRows;
  // Memory is fastest read in its order, one key after the other. Only where eight rows meet elements that
  // must be converted do the products take as long: there two keys share what is loaded of the rows.
  constexpr int kAtOnce = kKeys > 1 && kRows == 8 && sizeof(typename Rows::Element) < sizeof(T) ? 2 : 1;
  const int64_t padded = round_up_to_vector<T>(head_dim), ahead = rows_ahead<Stored>(head_dim);
  const RowTail<T> tail(head_dim);
  for (int64_t key = 0; key < count; key += kKeys) {
    const int64_t n = count - key < kKeys ? count - key : kKeys;
    typename S::Vec sums[kTile];
    SELFATTN_UNROLL
    for (int first = 0; first < kKeys; first += kAtOnce) {
      const typename Rows::Element *rows[kAtOnce], *soon[kAtOnce];
      SELFATTN_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t index = first + j < n ? first + j : n - 1;  // past the end: the last key once more
        rows[j] = keys.row(key + index);
        soon[j] = keys.soon(key + index, ahead);
      }
      thin_dots<T, Stored, kRows, kAtOnce, kKeys>(query, padded, rows, soon, tail, sums + first);
    }
    T scores[kTile];
    SELFATTN_UNROLL
    for (int i = 0; i < kTile; i += S::kWidth) {
      sum_lanes<T, S::kWidth / 2>(sums + i);
      S::store(scores + i, sums[i]);
    }
    if (key_step == 1 && n == kKeys) {
      SELFATTN_UNROLL
      for (int r = 0; r < kRows; ++r) memcpy(s + r * row_step + key, scores + r * kKeys, kKeys * sizeof(T));
    } else {
      for (int r = 0; r < kRows; ++r) {
        for (int64_t j = 0; j < n; ++j) s[r * row_step + (key + j) * key_step] = scores[r * kKeys + j];
      }
    }
  }
}

template <class T, class Rows>
void thin_scores_of(const T* query, int64_t rows, const Rows keys, int64_t count, int64_t head_dim, T* s,
                    int64_t row_step, int64_t key_step) {
  const int64_t padded = round_up_to_vector<T>(head_dim);
  int64_t r = 0;
  while (r + 8 <= rows) {
    thin_score_rows<T, 8>(query + r * padded, keys, count, head_dim, s + r * row_step, row_step, key_step);
    r += 8;
  }
  if (r + 4 <= rows) {
    thin_score_rows<T, 4>(query + r * padded, keys, count, head_dim, s + r * row_step, row_step, key_step);
    r += 4;
  }
  if (r + 2 <= rows) {
    thin_score_rows<T, 2>(query + r * padded, keys, count, head_dim, s + r * row_step, row_step, key_step);
    r += 2;
  }
  if (r + 1 <= rows) {
    thin_score_rows<T, 1>(query + r * padded, keys, count, head_dim, s + r * row_step, row_step, key_step);
    r += 1;
  }
}

template <class T, class Stored>
void thin_scores_as(const T* query, int64_t rows, const ThinRows& keys, int64_t count, int64_t head_dim, T* s,
                    int64_t row_step, int64_t key_step) {
  if (keys.address != nullptr) {
    thin_scores_of(query, rows, listed_rows<Stored>(keys), count, head_dim, s, row_step, key_step);
  } else {
    thin_scores_of(query, rows, strided_rows<Stored>(keys), count, head_dim, s, row_step, key_step);
  }
}

// s[row * row_step + key * key_step] = <query row, key> for rows of `query` ([rows][padded head_dim], zeros
// in the padding) and the first `count` keys.
template <class T>
void thin_scores(const T* query, int64_t rows, const ThinRows& keys, int64_t count, int64_t head_dim, T* s,
                 int64_t row_step, int64_t key_step) {
  if constexpr (sizeof(T) == 4) {
    if (keys.dtype == DType::kBFloat16) {
      return thin_scores_as<T, StoredBFloat16<T>>(query, rows, keys, count, head_dim, s, row_step, key_step);
    }
    if (keys.dtype == DType::kFloat16) {
      return thin_scores_as<T, StoredFloat16<T>>(query, rows, keys, count, head_dim, s, row_step, key_step);
    }
  }
  thin_scores_as<T, StoredPlain<T>>(query, rows, keys, count, head_dim, s, row_step, key_step);
}

// The same as a block of a strip: s[key][query], and 0 in the other lanes of the vectors, which every later
// step passes over as well.
template <class T>
void thin_score_block(const T* query, int64_t queries, const T* keys, int64_t key_stride, int64_t count,
                      int64_t head_dim, T* s, int64_t ld) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t lane = queries; lane < round_up_to_vector<T>(queries); ++lane) s[j * ld + lane] = T(0);
  }
  thin_scores<T>(query, queries, {dtype_of<T>(), keys, key_stride, nullptr, nullptr}, count, head_dim, s, 1,
                 ld);
}

// What a product with values needs besides them. Laid out as weights, `visible` is 0 where a key is to be
// left out; see multiply_visible.
template <class T>
struct ThinValues {
  const T* weights;  // [rows][ld], keys along a row
  const T* visible;  // nullable
  int64_t ld;
  int64_t count;  // of keys
  int64_t value_dim;
  const T* rescale;  // [rows]
  T* out;            // [rows][padded value_dim]
  // nullable, laid out as out: where the sums go on from and stay, out is left alone then. See add_sums.
  T* sums;
};

// kVecs vectors of columns from `at` on, or with kTail the fresh lanes of `tail`, of kRows rows: out = out *
// rescale + sum over keys.
template <class T, int kRows, int kVecs, bool kTail, class Rows>
SELFATTN_INLINE void thin_value_tile(const ThinValues<T>& a, int64_t row, const Rows& values, int64_t at,
                                     const RowTail<T>& tail) {
  using S = Simd<T>;
  using Stored = typename Rows::Type;
  const int64_t padded = round_up_to_vector<T>(a.value_dim);
  typename S::Vec sums[kRows][kVecs];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      sums[r][v] =
          a.sums != nullptr ? S::load(a.sums + (row + r) * padded + at + v * S::kWidth) : S::set(T(0));
    }
  }
  const T* weights = a.weights + row * a.ld;
  // Ahead lie the same columns of later rows, then the next columns' first row or that of the next block.
  const int64_t next = at + 2 * kVecs * S::kWidth <= tail.whole ? at + kVecs * S::kWidth : 0;
  const int64_t ahead = rows_ahead<Stored>(kVecs * S::kWidth);
  const T* visible = kRows == 1 && a.visible != nullptr ? a.visible + row * a.ld : nullptr;
  for (int64_t j = 0; j < a.count; ++j) {
    if (kRows == 1 && visible != nullptr && visible[j] == T(0)) continue;
    typename S::Vec x[kVecs];
    const auto* value = values.row(j);
    const auto* soon = values.soon(j, ahead, a.count, at, next);
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kTail) {
        x[v] = tail.template load<Stored>(value);
      } else {
        x[v] = Stored::load(value + at + v * S::kWidth);
        if (v % kVecsOfLine<T, Stored> == 0) fetch_ahead(soon + v * S::kWidth);
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
    const auto scale = S::set(a.rescale[row + r]);
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      T* to = (a.sums != nullptr ? a.sums : a.out) + (row + r) * padded + at + v * S::kWidth;
      const auto old = S::load(to);
      const auto sum = a.sums != nullptr ? sums[r][v] : S::fma(old, scale, sums[r][v]);
      S::store(to, kTail ? S::select(tail.fresh, sum, old) : sum);
    }
  }
}

template <class T, int kRows, int kVecs, class Rows>
SELFATTN_INLINE int64_t thin_value_columns(const ThinValues<T>& a, int64_t row, const Rows& values,
                                           int64_t at, const RowTail<T>& tail) {
  for (; at + kVecs * Simd<T>::kWidth <= tail.whole; at += kVecs * Simd<T>::kWidth) {
    thin_value_tile<T, kRows, kVecs, false>(a, row, values, at, tail);
  }
  return at;
}

template <class T, int kRows, class Rows>
void thin_value_rows(const ThinValues<T>& a, int64_t row, const Rows values) {
  constexpr int kVecs = kThinTile<T> / kRows < 8 ? kThinTile<T> / kRows : 8;
  const RowTail<T> tail(a.value_dim);
  int64_t at = thin_value_columns<T, kRows, kVecs>(a, row, values, 0, tail);
  if constexpr (kVecs > 4) at = thin_value_columns<T, kRows, 4>(a, row, values, at, tail);
  if constexpr (kVecs > 2) at = thin_value_columns<T, kRows, 2>(a, row, values, at, tail);
  if constexpr (kVecs > 1) at = thin_value_columns<T, kRows, 1>(a, row, values, at, tail);
  if (tail.any()) thin_value_tile<T, kRows, 1, true>(a, row, values, tail.at, tail);
}

template <class T, class Rows>
void thin_values_of(const ThinValues<T>& a, int64_t rows, const Rows values) {
  int64_t r = 0;
  if (a.visible == nullptr) {  // keys are left out for one row at a time
    for (; r + 8 <= rows; r += 8) thin_value_rows<T, 8>(a, r, values);
    for (; r + 4 <= rows; r += 4) thin_value_rows<T, 4>(a, r, values);
    for (; r + 2 <= rows; r += 2) thin_value_rows<T, 2>(a, r, values);
  }
  for (; r < rows; ++r) thin_value_rows<T, 1>(a, r, values);
}

template <class T, class Stored>
void thin_values_as(const ThinValues<T>& a, int64_t rows, const ThinRows& values) {
  values.address != nullptr ? thin_values_of(a, rows, listed_rows<Stored>(values))
                            : thin_values_of(a, rows, strided_rows<Stored>(values));
}

// out[row] = out[row] * rescale[row] + sums, for sums that thin_values left.
template <class T>
void add_sums(const ThinValues<T>& a, int64_t rows) {
  using S = Simd<T>;
  const int64_t padded = round_up_to_vector<T>(a.value_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const auto scale = S::set(a.rescale[row]);
    for (int64_t e = row * padded; e < (row + 1) * padded; e += S::kWidth) {
      S::store(a.out + e, S::fma(S::load(a.out + e), scale, S::load(a.sums + e)));
    }
  }
}

// out[row] = out[row] * rescale[row] + sum over keys of weights[row][key] * value[key].
template <class T>
void thin_values(const ThinValues<T>& a, int64_t rows, const ThinRows& values) {
  if constexpr (sizeof(T) == 4) {
    if (values.dtype == DType::kBFloat16) return thin_values_as<T, StoredBFloat16<T>>(a, rows, values);
    if (values.dtype == DType::kFloat16) return thin_values_as<T, StoredFloat16<T>>(a, rows, values);
  }
  thin_values_as<T, StoredPlain<T>>(a, rows, values);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
