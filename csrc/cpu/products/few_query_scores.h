// Dot products of very few queries with keys; see few_query_rows.h.
#pragma once

#include <type_traits>

#include "few_query_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Sums kCount vectors over their lanes, in place, where those of a row of queries lie kStride apart: lane i
// of sums[0] becomes the sum of vector i, always as the same tree. Halves come first, as in a transpose (see
// tensor_rows.h), and each is added as soon as it is there. With fewer vectors than lanes, sums are partial,
// and a second call completes them.
template <class T, int kCount, int kStride = 1>
SELFATTN_INLINE void sum_lanes(typename Simd<T>::Vec* sums) {
  using S = Simd<T>;
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
    SELFATTN_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      auto& sum = sums[i * kStride];
      const auto other = sums[(i + kHalf) * kStride];
      sum = S::add(S::interleave_low(sum, other), S::interleave_high(sum, other));
    }
    sum_lanes<T, kHalf, kStride>(sums);
  }
}

// The multiply-adds of few_query_dots for one vector of elements.
template <class T, class Stored, int kRows, int kKeys>
SELFATTN_INLINE void few_query_dots_step(const typename Stored::Query* query, int64_t padded,
                                         const typename Stored::Element* const* keys, int64_t e,
                                         typename Simd<T>::Vec (*sums)[kKeys]) {
  decltype(Stored::load(nullptr)) k[kKeys];
  SELFATTN_UNROLL
  for (int j = 0; j < kKeys; ++j) k[j] = Stored::load(keys[j] + e);
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto q = Stored::load_query(query + r * padded + e);
    SELFATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) sums[r][j] = Stored::multiply_add(k[j], q, sums[r][j]);
  }
}

// Multiplies kRows rows of `query` by kKeys rows of `keys`; sums over lanes are left to the caller. Meanwhile
// it prefetches a line of each of `soon`, and then those `soon_step` lines further.
template <class T, class Stored, int kRows, int kKeys>
SELFATTN_INLINE void few_query_dots(const typename Stored::Query* query, int64_t padded,
                                    const typename Stored::Element* const* keys,
                                    const typename Stored::Element* const* soon, int64_t soon_step,
                                    const RowTail<T, Stored>& tail, typename Simd<T>::Vec (*sums)[kKeys]) {
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) sums[r][j] = Simd<T>::set(T(0));
  }
  constexpr int kVec = Stored::kElements;
  int64_t e = 0;
  for (; e + kLineElements<Stored> <= tail.whole; e += kLineElements<Stored>) {
    SELFATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) fetch_ahead(soon[j] + e * soon_step);
    SELFATTN_UNROLL
    for (int v = 0; v < kVecsOfLine<Stored>; ++v) {
      few_query_dots_step<T, Stored, kRows, kKeys>(query, padded, keys, e + v * kVec, sums);
    }
  }
  for (; e < tail.whole; e += kVec) {
    few_query_dots_step<T, Stored, kRows, kKeys>(query, padded, keys, e, sums);
  }
  if (!tail.any()) return;
  SELFATTN_UNROLL
  for (int j = 0; j < kKeys; ++j) {
    const auto k = tail.load(keys[j]);
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto q = Stored::load_query(query + r * padded + tail.at);
      sums[r][j] = tail.chosen(Stored::multiply_add(k, q, sums[r][j]), sums[r][j]);
    }
  }
}

template <class Stored>
int64_t padded_query(int64_t head_dim) {
  return round_up(head_dim, Stored::kElements);
}

// How a tile of kRows rows by kKeys keys becomes vectors of sums.
template <class T, int kRows>
struct FewQueryTile {
  static constexpr int kSize = kFewQueryTile<T>, kKeys = kSize / kRows;
  // Rows whose sums over lanes share a vector with one another.
  static constexpr int kRowsOfGroup = kKeys < Simd<T>::kWidth ? Simd<T>::kWidth / kKeys : 1;
  static constexpr int kGroups = kRows / kRowsOfGroup;
};

// Stores the scores of the first n keys of a tile. of_keys[g * kKeys + j] holds partial sums of key j, of the
// rows of group g.
template <class T, int kRows>
SELFATTN_INLINE void store_scores(typename Simd<T>::Vec* of_keys, int64_t n, T* s, int64_t row_step,
                                  int64_t key_step) {
  using S = Simd<T>;
  using Tile = FewQueryTile<T, kRows>;
  T scores[Tile::kSize];
  constexpr int kOfVector = S::kWidth / Tile::kRowsOfGroup;  // keys of a vector
  SELFATTN_UNROLL
  for (int i = 0; i < Tile::kGroups * Tile::kKeys; i += kOfVector) {
    sum_lanes<T, kOfVector>(of_keys + i);
    S::store(scores + i * Tile::kRowsOfGroup, of_keys[i]);
  }
  if (key_step == 1 && n == Tile::kKeys) {
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r)
      memcpy(s + r * row_step, scores + r * Tile::kKeys, Tile::kKeys * sizeof(T));
    return;
  }
  // This is seldom, and unrolled it was a third of the function.
  SELFATTN_ROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_ROLL
    for (int64_t j = 0; j < Tile::kKeys; ++j) {
      if (j == n) break;
      s[r * row_step + j * key_step] = scores[r * Tile::kKeys + j];
    }
  }
}

// Computes kRows rows of scores; see few_query_scores. kAtOnce keys share what is loaded of the queries. With
// kListed the keys are rows of a list.
template <class T, int kRows, int kAtOnce, class Stored, bool kListed = false>
void few_query_score_rows(const typename Stored::Query* query, const FewQueryRows& keys, int64_t head_dim,
                          T* s, int64_t row_step, int64_t key_step) {
  using S = Simd<T>;
  using Element = typename Stored::Element;
  using Tile = FewQueryTile<T, kRows>;
  constexpr int kKeys = Tile::kKeys, kRowsOfGroup = Tile::kRowsOfGroup, kGroups = Tile::kGroups;
  const int64_t padded = padded_query<Stored>(head_dim), count = keys.count;
  const RowTail<T, Stored> tail(head_dim);
  RowWalk walk = keys.rows;
  RowsAhead walk_ahead = keys.soon;
  RowWalk::Steps key_rows(walk);
  RowsAhead::Steps soon_rows(walk_ahead);
  for (int64_t key = 0; key < count; key += kKeys) {
    const int64_t n = smaller(count - key, kKeys);
    // The sums of a key's rows become one vector before the next key's are begun: all of them together would
    // not stay in registers. This loop is not unrolled: up to sixteen copies of a key's products took a
    // quarter of the time of compiling, to save a store.
    typename S::Vec of_keys[kGroups * kKeys];
    for (int first = 0; first < kKeys; first += kAtOnce) {
      if (first >= n) {  // with very few keys, products of none would be most of the work
        SELFATTN_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          SELFATTN_UNROLL
          for (int j = 0; j < kAtOnce; ++j) of_keys[g * kKeys + first + j] = S::set(T(0));
        }
        continue;
      }
      const Element *rows[kAtOnce], *soon[kAtOnce];
      SELFATTN_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {  // past the end the walk repeats the last key
        if constexpr (kListed) {
          const int64_t at = smaller(key + first + j, count - 1);
          rows[j] = reinterpret_cast<const Element*>(keys.list.row[at]);
          soon[j] = reinterpret_cast<const Element*>(keys.list.soon(at));
        } else {
          rows[j] = reinterpret_cast<const Element*>(key_rows.next());
          soon[j] = reinterpret_cast<const Element*>(soon_rows.next());
        }
      }
      // Memory is read fastest in its own order.
      const bool in_order = kAtOnce > 1 && soon[kAtOnce - 1] - soon[0] == (kAtOnce - 1) * head_dim;
      for (int j = 1; j < kAtOnce && in_order; ++j) soon[j] = soon[0] + j * kLineElements<Stored>;
      typename S::Vec sums[kRows][kAtOnce];
      few_query_dots<T, Stored, kRows, kAtOnce>(query, padded, rows, soon, in_order ? kAtOnce : 1, tail,
                                                sums);
      SELFATTN_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        SELFATTN_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {
          sum_lanes<T, kRowsOfGroup, kAtOnce>(&sums[g * kRowsOfGroup][j]);
          of_keys[g * kKeys + first + j] = sums[g * kRowsOfGroup][j];
        }
      }
    }
    store_scores<T, kRows>(of_keys, n, s + key * key_step, row_step, key_step);
  }
}

// Computes the same for keys of kVecs vectors, of which the last one is a RowTail's with kPart: the queries
// stay in registers, a key takes one step, and several rows may lie in a line that is prefetched.
template <class T, int kRows, int kVecs, bool kPart, class Stored>
void few_query_narrow_score_rows(const typename Stored::Query* query, FewQueryRows keys, int64_t head_dim,
                                 T* s, int64_t row_step, int64_t key_step) {
  using S = Simd<T>;
  using Tile = FewQueryTile<T, kRows>;
  constexpr int kLines = (kVecs + kVecsOfLine<Stored> - 1) / kVecsOfLine<Stored>;  // of a row
  const RowTail<T, Stored> tail(head_dim);
  decltype(Stored::load_query(nullptr)) q[kRows][kVecs];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = kPart && v == kVecs - 1 ? tail.at : v * Stored::kElements;
      q[r][v] = Stored::load_query(query + r * kVecs * Stored::kElements + at);
    }
  }
  while (keys.count > 0) {
    const FewQueryRows::Even some = keys.take_even(keys.count);
    const RowRun run = some.rows;
    const int64_t line_step = larger(some.soon.step, kLine), soon_bytes = Tile::kKeys * some.soon.step;
    for (int64_t key = 0; key < run.rows; key += Tile::kKeys) {
      const int64_t n = smaller(run.rows - key, Tile::kKeys);
      const char* soon = some.soon.first + key * some.soon.step;
      for (int64_t at = 0; at < soon_bytes; at += line_step) {
        SELFATTN_UNROLL
        for (int line = 0; line < kLines; ++line) fetch_ahead(soon + at + line * kLine);
      }
      typename S::Vec sums[kRows][Tile::kKeys], of_keys[Tile::kGroups * Tile::kKeys];
      SELFATTN_UNROLL
      for (int j = 0; j < Tile::kKeys; ++j) {  // past the end the last key is repeated
        const char* at = run.first + (key + smaller(j, n - 1)) * run.step;
        const auto* row = reinterpret_cast<const typename Stored::Element*>(at);
        SELFATTN_UNROLL
        for (int r = 0; r < kRows; ++r) sums[r][j] = S::set(T(0));
        SELFATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          const bool last_of_row = kPart && v == kVecs - 1;
          const auto k = last_of_row ? tail.load(row) : Stored::load(row + v * Stored::kElements);
          SELFATTN_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const auto sum = Stored::multiply_add(k, q[r][v], sums[r][j]);
            sums[r][j] = last_of_row && kVecs > 1 ? tail.chosen(sum, sums[r][j]) : sum;
          }
        }
      }
      SELFATTN_UNROLL
      for (int g = 0; g < Tile::kGroups; ++g) {
        SELFATTN_UNROLL
        for (int j = 0; j < Tile::kKeys; ++j) {
          sum_lanes<T, Tile::kRowsOfGroup, Tile::kKeys>(&sums[g * Tile::kRowsOfGroup][j]);
          of_keys[g * Tile::kKeys + j] = sums[g * Tile::kRowsOfGroup][j];
        }
      }
      store_scores<T, kRows>(of_keys, n, s + key * key_step, row_step, key_step);
    }
    s += run.rows * key_step;
  }
}

template <class T, int kRows, class Stored>
void few_query_score_rows(const typename Stored::Query* query, const FewQueryRows& keys, int64_t head_dim,
                          T* s, int64_t row_step, int64_t key_step) {
  constexpr int kKeys = kFewQueryTile<T> / kRows;
  constexpr int64_t kVec = Stored::kElements;
  if constexpr (kRows <= 4) {
    if (head_dim == kVec) {
      return few_query_narrow_score_rows<T, kRows, 1, false, Stored>(query, keys, head_dim, s, row_step,
                                                                     key_step);
    }
    if constexpr (Simd<T>::kLoadsParts) {
      if (head_dim < kVec && head_dim > 0) {
        return few_query_narrow_score_rows<T, kRows, 1, true, Stored>(query, keys, head_dim, s, row_step,
                                                                      key_step);
      }
    }
  }
  if constexpr (kRows == 1) {
    if (head_dim == 3 * kVec) {
      return few_query_narrow_score_rows<T, kRows, 3, false, Stored>(query, keys, head_dim, s, row_step,
                                                                     key_step);
    }
    if (head_dim > 2 * kVec && head_dim < 3 * kVec) {
      return few_query_narrow_score_rows<T, kRows, 3, true, Stored>(query, keys, head_dim, s, row_step,
                                                                    key_step);
    }
  }
  if constexpr (kRows <= 2) {
    if (head_dim == 2 * kVec) {
      return few_query_narrow_score_rows<T, kRows, 2, false, Stored>(query, keys, head_dim, s, row_step,
                                                                     key_step);
    }
    if (head_dim > kVec && head_dim < 2 * kVec) {
      return few_query_narrow_score_rows<T, kRows, 2, true, Stored>(query, keys, head_dim, s, row_step,
                                                                    key_step);
    }
  }
  if constexpr (kKeys > 1 && kKeys <= 4) {
    if (keys.in_long_runs(head_dim * static_cast<int64_t>(sizeof(typename Stored::Element)))) {
      return few_query_score_rows<T, kRows, kKeys, Stored>(query, keys, head_dim, s, row_step, key_step);
    }
  }
  // Memory is read fastest in its own order, one key after the other. Products take as long only where eight
  // rows meet elements that must be converted: there, two keys go at once.
  constexpr bool kConverts =
      Stored::kElements * sizeof(typename Stored::Element) < sizeof(typename Simd<T>::Vec);
  constexpr int kAtOnce = kKeys > 1 && kRows == 8 && kConverts ? 2 : 1;
  few_query_score_rows<T, kRows, kAtOnce, Stored>(query, keys, head_dim, s, row_step, key_step);
}

// Does it for rows of a list, which are expected in a cache: no order of reading is the fastest.
template <class T, int kRows, class Stored>
void few_query_listed_score_rows(const typename Stored::Query* query, const FewQueryRows& keys,
                                 int64_t head_dim, T* s, int64_t row_step, int64_t key_step) {
  constexpr int kAtOnce = smaller(FewQueryTile<T, kRows>::kKeys, 4);
  few_query_score_rows<T, kRows, kAtOnce, Stored, true>(query, keys, head_dim, s, row_step, key_step);
}

template <class T, class Stored, bool kListed = false>
void few_query_scores_as(const typename Stored::Query* query, int64_t rows, const FewQueryRows& keys,
                         int64_t head_dim, T* s, int64_t row_step, int64_t key_step) {
  const int64_t padded = padded_query<Stored>(head_dim);
  int64_t r = 0;
  const auto next_rows = [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    const auto* of_rows = query + r * padded;
    T* const to = s + r * row_step;
    if constexpr (kListed) {
      few_query_listed_score_rows<T, kRows, Stored>(of_rows, keys, head_dim, to, row_step, key_step);
    } else {
      few_query_score_rows<T, kRows, Stored>(of_rows, keys, head_dim, to, row_step, key_step);
    }
    r += kRows;
  };
  while (r + 8 <= rows) next_rows(std::integral_constant<int, 8>());
  if (r + 4 <= rows) next_rows(std::integral_constant<int, 4>());
  if (r + 2 <= rows) next_rows(std::integral_constant<int, 2>());
  if (r + 1 <= rows) next_rows(std::integral_constant<int, 1>());
}

// s[row * row_step + key * key_step] = <query row, key> for rows of `query`, [rows][padded head_dim] with
// zeros in the padding, and at least one key. With kListed the keys are rows of a list.
template <class T, bool kListed = false>
SELFATTN_OUT_OF_LINE void few_query_scores(const T* query, int64_t rows, const FewQueryRows& keys,
                                           int64_t head_dim, T* s, int64_t row_step, int64_t key_step) {
  if constexpr (sizeof(T) == 4) {
    if (keys.dtype == DType::kBFloat16) {
      return few_query_scores_as<T, StoredBFloat16<T>, kListed>(query, rows, keys, head_dim, s, row_step,
                                                                key_step);
    }
    if (keys.dtype == DType::kFloat16) {
      return few_query_scores_as<T, StoredFloat16<T>, kListed>(query, rows, keys, head_dim, s, row_step,
                                                               key_step);
    }
  }
  few_query_scores_as<T, StoredAsT<T>, kListed>(query, rows, keys, head_dim, s, row_step, key_step);
}

// Returns a single such product, <query, row>, with the same bits.
template <class T>
SELFATTN_OUT_OF_LINE T few_query_dot(const T* query, const T* row, int64_t columns) {
  using S = Simd<T>;
  const RowTail<T, StoredAsT<T>> tail(columns);
  typename S::Vec sums[1][1];
  few_query_dots<T, StoredAsT<T>, 1, 1>(query, 0, &row, &row, 1, tail, sums);
  // The tree of sum_lanes.
  SELFATTN_UNROLL
  for (int i = 1; i < S::kWidth; i *= 2) {
    sums[0][0] =
        S::add(S::interleave_low(sums[0][0], sums[0][0]), S::interleave_high(sums[0][0], sums[0][0]));
  }
  T lanes[S::kWidth];
  S::store(lanes, sums[0][0]);
  return lanes[0];
}

// Computes the same as a block of a strip: s[key][query]. The other lanes of the vectors become 0, since
// every later step passes over them as well.
template <class T>
void few_query_score_block(const T* query, int64_t queries, const T* keys, int64_t key_stride, int64_t count,
                           int64_t head_dim, T* s, int64_t ld) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t lane = queries; lane < round_up_to_vector<T>(queries); ++lane) s[j * ld + lane] = T(0);
  }
  const int64_t row_bytes = key_stride * static_cast<int64_t>(sizeof(T));
  const EvenRows rows(dtype_of<T>(), keys, count, row_bytes, row_bytes);
  few_query_scores<T>(query, queries, rows.rows(), head_dim, s, 1, ld);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
