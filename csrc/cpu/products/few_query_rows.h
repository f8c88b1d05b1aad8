// Rows of keys and values for products with very few queries, as in generating text. Lanes that run over
// queries would be mostly empty, so here they run over the head dim: a score is a dot product
// (few_query_scores.h), an output row is a sum of scaled value rows (few_query_values.h). Keys and values are
// read where they lie, in their own type, and converted in registers; what is loaded serves up to eight rows
// of queries, those of all heads that read it.
//
// Every sum has one order, that of a single row: it depends on the head dim alone, not on how many rows or
// keys share a tile, where the keys lie or in which type they are stored. So a row has the same result in any
// group, and a pass that computes a score again gets the bits of the forward.
#pragma once

#include "row_walk.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Returns how many queries are few: up to so many, a dot product per query beats a vector of lanes of which
// half are empty. Rows that are short take longer to sum up over their lanes than to multiply. The head dim
// alone tells, as passes without values must agree with the forward.
template <class T>
int64_t most_few_queries(int64_t head_dim) {
  constexpr int64_t kWidth = Simd<T>::kWidth, kFew = 4;
  return kWidth / 2 > kFew && head_dim >= 3 * kWidth ? kWidth / 2 : kFew;
}
inline int64_t most_few_queries(const AttentionParams& p) {
  return p.dtype == DType::kFloat64 ? most_few_queries<double>(p.head_dim)
                                    : most_few_queries<float>(p.head_dim);
}

// Whether queries may be multiplied by the scale: beyond these bounds a query could overflow or vanish where
// its scores do not.
inline bool scale_keeps_queries(double scale) {
  const double factor = std::abs(scale);
  return factor == 0.0 || (factor >= 0x1p-32 && factor <= 0x1p32);
}

// Accumulators of a tile: as many as the registers hold beside its operands, and at least a vector's width.
template <class T>
constexpr int kFewQueryTile = Simd<T>::kTileRows > 4 ? 16 : 8;

// The members of all kinds of elements that become vectors of T when they are loaded.
template <class T>
struct LoadedAsT {
  using Query = T;                                   // an element of a row of queries
  static constexpr int kElements = Simd<T>::kWidth;  // elements of a vector
  static SELFATTN_INLINE typename Simd<T>::Vec load_query(const T* p) { return Simd<T>::load(p); }
  static SELFATTN_INLINE typename Simd<T>::Vec multiply_add(typename Simd<T>::Vec key,
                                                            typename Simd<T>::Vec query,
                                                            typename Simd<T>::Vec sum) {
    return Simd<T>::fma(key, query, sum);
  }
};
template <class T>
struct StoredAsT : LoadedAsT<T> {
  using Element = T;
  static constexpr DType kDType = dtype_of<T>();
  static SELFATTN_INLINE typename Simd<T>::Vec load(const T* p) { return Simd<T>::load(p); }
  static SELFATTN_INLINE typename Simd<T>::Vec load_part(const T* p, int64_t n) {
    return Simd<T>::load_part(p, n);
  }
  static SELFATTN_INLINE void store(T* p, typename Simd<T>::Vec v) { Simd<T>::store(p, v); }
};
template <class T>
struct StoredBFloat16 : LoadedAsT<T> {
  using Element = uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  static SELFATTN_INLINE typename Simd<T>::Vec load(const uint16_t* p) { return Simd<T>::load_bfloat16(p); }
  static SELFATTN_INLINE typename Simd<T>::Vec load_part(const uint16_t* p, int64_t n) {
    return Simd<T>::load_bfloat16_part(p, n);
  }
  static SELFATTN_INLINE void store(uint16_t* p, typename Simd<T>::Vec v) { Simd<T>::store_bfloat16(p, v); }
};
template <class T>
struct StoredFloat16 : LoadedAsT<T> {
  using Element = uint16_t;
  static constexpr DType kDType = DType::kFloat16;
  static SELFATTN_INLINE typename Simd<T>::Vec load(const uint16_t* p) { return Simd<T>::load_float16(p); }
  static SELFATTN_INLINE typename Simd<T>::Vec load_part(const uint16_t* p, int64_t n) {
    return Simd<T>::load_float16_part(p, n);
  }
  static SELFATTN_INLINE void store(uint16_t* p, typename Simd<T>::Vec v) { Simd<T>::store_float16(p, v); }
};

template <class Stored>
constexpr int64_t kLineElements = kLine / static_cast<int64_t>(sizeof(typename Stored::Element));
// Vectors in a line of elements.
template <class Stored>
constexpr int kVecsOfLine = static_cast<int>(kLineElements<Stored>) / Stored::kElements;

// Neighbouring queries of neighbouring heads, which read one kv head.
struct FewQueries {
  int64_t batch, head, heads, query, queries;
  int64_t rows() const { return heads * queries; }
};

// A line is prefetched this far ahead: about as much as is under way between memory and a core at once.
constexpr int64_t kBytesAhead = kFetchInto == 3 ? 8192 : 32768;

// The same distance in rows. Rows shorter than a line are not prefetched, so any number will do for them.
inline int64_t rows_ahead(int64_t row_bytes) {
  return row_bytes <= kLine ? kBytesAhead / kLine : row_bytes < kBytesAhead ? kBytesAhead / row_bytes : 1;
}

// Where rows begin that lie anywhere. They are expected in a cache, if not in the nearest one.
struct RowList {
  const char* const* row = nullptr;
  int64_t known = 0;  // rows of the list, which may be more than those of a product

  // Returns the row to prefetch while row n is used.
  SELFATTN_INLINE const char* soon(int64_t n) const {
    constexpr int64_t kAhead = 16;
    return row[smaller(n + kAhead, known - 1)];
  }
  RowList from(int64_t n) const { return {row + n, known - n}; }
};

// The rows of a product, and the rows to prefetch meanwhile, one for each.
struct FewQueryRows {
  DType dtype;
  int64_t count;
  RowWalk rows;
  RowsAhead soon;
  RowList list = {};  // if they lie anywhere

  // Whether rows lie without gaps for so long that products may use them out of order, if they prefetch in
  // the order of memory. In short pages and in turns of several heads (see head_step) that costs more than it
  // saves: docs/performance-lessons.md.
  bool in_long_runs(int64_t row_bytes) const {
    constexpr int64_t kLongRun = 32768;  // bytes
    return rows.step() == row_bytes && row_bytes % kLine == 0 && rows.even() * row_bytes > kLongRun;
  }

  // The next rows, at most `most`, and those to prefetch, both evenly spaced. Their number is even but for
  // the last.
  struct Even {
    RowRun rows, soon;
    RowList list = {};  // if it is one, only the number of `rows` counts

    // The lines that a product prefetches while it uses `bytes` bytes of each row from `at` on: as many, in
    // the order of memory if there are no gaps.
    RowRun soon_columns(int64_t at, int64_t bytes, int64_t row_bytes) const {
      if (soon.step != row_bytes || row_bytes % kLine != 0) return {soon.first + at, soon.rows, soon.step};
      return {soon.first + at * soon.rows, soon.rows, bytes};
    }
  };
  Even take_even(int64_t most) {
    if (list.row != nullptr) {
      const Even some{{nullptr, smaller(count, most), 0}, {nullptr, 0, 0}, list};
      list = list.from(some.rows.rows);
      count -= some.rows.rows;
      return some;
    }
    const int64_t n = even_number(smaller(soon.even(), most));
    return {rows.take(n), soon.take(n), {}};
  }
  // Takes the next rows without those to prefetch.
  RowRun take_rows(int64_t most) { return rows.take(even_number(most)); }

 private:
  int64_t even_number(int64_t most) {
    int64_t n = smaller(rows.even(), most) / 2 * 2;
    if (n == 0) n = 2;
    n = smaller(n, count);
    count -= n;
    return n;
  }
};

// Evenly spaced rows of a tensor without pages; those a way ahead are prefetched, the ones after them, too.
class EvenRows {
 public:
  // `step` is the distance of rows in bytes, `row_bytes` their length.
  EvenRows(DType dtype, const void* first, int64_t count, int64_t step, int64_t row_bytes)
      : dtype_(dtype),
        first_(static_cast<const char*>(first)),
        rows_{&first_, INT64_MAX, 0, count, step, 0},
        soon_{&first_, INT64_MAX, rows_ahead(row_bytes), count, step, 0} {}
  EvenRows(const EvenRows&) = delete;
  EvenRows& operator=(const EvenRows&) = delete;

  FewQueryRows rows() const { return {dtype_, rows_.keys, RowWalk(rows_), RowsAhead(RowWalk(soon_))}; }

 private:
  DType dtype_;
  const char* first_;
  RowSpan rows_, soon_;
};

// Rows that lie anywhere, by a list of where they begin. The list has `known` rows: those after the first
// `count` are used next.
class ListedRows {
 public:
  ListedRows(DType dtype, const char* const* rows, int64_t count, int64_t known)
      : dtype_(dtype), rows_(RowSpan::of_list(rows, count)), known_(known) {}
  ListedRows(const ListedRows&) = delete;
  ListedRows& operator=(const ListedRows&) = delete;

  FewQueryRows rows() const {
    const RowWalk walk(rows_);
    return {dtype_, rows_.keys, walk, RowsAhead(walk), {rows_.pages, known_}};
  }

 private:
  DType dtype_;
  RowSpan rows_;
  int64_t known_;
};

// How a row of n elements falls into vectors: `whole` elements in whole ones, and a last one that is shifted
// back to end with the row, so that nothing outside the row is read. Its lanes that repeat earlier elements
// are not `fresh`. A row shorter than a vector is padded with zeros instead.
template <class T, class Stored>
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
  SELFATTN_INLINE typename S::Vec load(const typename Stored::Element* row) const {
    if (n >= S::kWidth) return Stored::load(row + at);
    if constexpr (S::kLoadsParts) return Stored::load_part(row, n);
    // load_row is not used: a call would take the accumulators out of their registers.
    T buffer[S::kWidth];
    SELFATTN_ROLL
    for (int64_t i = 0; i < S::kWidth; ++i) {
      buffer[i] = i < n ? load_element<T>(row, Stored::kDType, i) : T(0);
    }
    return S::load(buffer);
  }
  // Takes the sum after the tail's product in fresh lanes only. It is chosen afterwards, since a zero in
  // place of a repeated element would make NaN of an infinite factor.
  SELFATTN_INLINE typename S::Vec chosen(typename S::Vec after, typename S::Vec before) const {
    return S::select(fresh, after, before);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
