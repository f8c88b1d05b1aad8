// Decoding in bfloat16 by VDPBF16PS: twice the work per instruction, nothing to convert. These products take
// the place of few_query_scores.h and few_query_values.h, for processors whose memory is faster than float's
// multiply-adds.
#pragma once

#include "../products/few_query_products.h"
#include "decode_weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

// bfloat16 elements, which are multiplied as they are stored.
struct StoredPairs {
  using Element = uint16_t;
  using Query = uint16_t;
  static constexpr int kElements = 32;
  static SELFATTN_INLINE __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static SELFATTN_INLINE __m512bh load_query(const uint16_t* p) { return load(p); }
  static SELFATTN_INLINE __m512 multiply_add(__m512bh key, __m512bh query, __m512 sum) {
    return _mm512_dpbf16_ps(sum, key, query);
  }
};

template <>
struct RowTail<float, StoredPairs> {
  int64_t whole, n, at;
  __mmask32 mask;

  explicit SELFATTN_INLINE RowTail(int64_t size)
      : whole(size / 32 * 32), n(size), at(whole), mask(elements_below(size - whole)) {}
  SELFATTN_INLINE bool any() const { return whole < n; }
  SELFATTN_INLINE __m512bh load(const uint16_t* row) const {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, row + at);
  }
  // Lanes past the end met zeros, which added nothing.
  SELFATTN_INLINE __m512 chosen(__m512 after, __m512) const { return after; }
};

// Loads the first elements of a row, as many as the mask names, or zeros if the row takes no part.
template <bool kWhole>
SELFATTN_INLINE __m512i load_values(const char* row, __mmask32 mask, bool takes_part) {
  if (kWhole && takes_part) return _mm512_loadu_si512(row);
  return _mm512_maskz_loadu_epi16(takes_part ? mask : 0, row);
}

using PairValues = FewQueryValues<float, uint32_t>;

// Sums kWide times 32 columns from `at` on, for kRows rows. The weights of two keys are one word, see
// round_weights.
template <int kRows, int kWide, bool kTail, bool kListed>
SELFATTN_INLINE void pair_value_tile(const PairValues& a, int64_t row, const FewQueryRows::Even& values,
                                     int64_t at) {
  const __mmask32 mask = elements_below(kTail ? a.value_dim - at : 32);
  float* sums_at = a.sums + row * a.ld_sums + at;
  __m512 sums[kRows][2 * kWide];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < 2 * kWide; ++v) sums[r][v] = _mm512_loadu_ps(sums_at + r * a.ld_sums + v * 16);
  }
  const uint32_t* weights = a.weights + row * a.ld;
  const float* visible = kRows == 1 && a.visible != nullptr ? a.visible + row * a.ld : nullptr;
  const RowRun soon_rows = values.soon_columns(at * 2, kWide * 64, a.value_dim * 2);
  const int64_t count = values.rows.rows, step = values.rows.step, soon_step = soon_rows.step;
  const char *first = values.rows.first + at * 2, *soon = soon_rows.first;
  for (int64_t j = 0; j < count; j += 2) {
    // The weight of a row that does not take part is 0.
    const bool takes_first = visible == nullptr || visible[j] != 0.0f;
    const bool takes_second = j + 1 < count && (visible == nullptr || visible[j + 1] != 0.0f);
    const char *second = first + step, *second_soon = soon + soon_step;
    if constexpr (kListed) {
      const int64_t next = smaller(j + 1, count - 1);
      first = values.list.row[j] + at * 2;
      second = values.list.row[next] + at * 2;
      soon = values.list.soon(j) + at * 2;
      second_soon = values.list.soon(next) + at * 2;
    }
    // Rows are loaded in the order of memory, which is read fastest that way.
    __m512i above[kWide], below[kWide];
    SELFATTN_UNROLL
    for (int v = 0; v < kWide; ++v) {
      fetch_ahead(soon + v * 64);
      above[v] = load_values<!kTail>(first + v * 64, mask, takes_first);
    }
    SELFATTN_UNROLL
    for (int v = 0; v < kWide; ++v) {
      fetch_ahead(second_soon + v * 64);
      below[v] = load_values<!kTail>(second + v * 64, mask, takes_second);
    }
    __m512bh x[2 * kWide];
    SELFATTN_UNROLL
    for (int v = 0; v < kWide; ++v) {
      x[2 * v] = (__m512bh)interleave_rows<0>(above[v], below[v]);
      x[2 * v + 1] = (__m512bh)interleave_rows<16>(above[v], below[v]);
    }
    first += 2 * step;
    soon += 2 * soon_step;
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(weights[r * a.ld + j / 2]));
      SELFATTN_UNROLL
      for (int v = 0; v < 2 * kWide; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x[v], weight);
    }
  }
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < 2 * kWide; ++v) _mm512_storeu_ps(sums_at + r * a.ld_sums + v * 16, sums[r][v]);
  }
}

// Adds all columns of some rows, for few_query_value_steps.
struct PairColumns {
  static constexpr int64_t kElementBytes = 2;
  static constexpr int wide_of(int rows) { return rows >= 8 ? 1 : rows == 4 ? 2 : 4; }
  static constexpr int64_t columns_of(int rows) { return wide_of(rows) * 32; }

  template <int kRows, int kWide, bool kListed>
  SELFATTN_INLINE int64_t tiles(const PairValues& a, int64_t row, const FewQueryRows::Even& values,
                                int64_t at) const {
    for (; at + kWide * 32 <= a.value_dim; at += kWide * 32) {
      pair_value_tile<kRows, kWide, false, kListed>(a, row, values, at);
    }
    return at;
  }
  template <int kRows, bool kListed = false>
  void add(const PairValues& a, int64_t row, const FewQueryRows::Even& values) const {
    constexpr int kWide = wide_of(kRows);
    int64_t at = tiles<kRows, kWide, kListed>(a, row, values, 0);
    if constexpr (kWide > 2) at = tiles<kRows, 2, kListed>(a, row, values, at);
    if constexpr (kWide > 1) at = tiles<kRows, 1, kListed>(a, row, values, at);
    if (at < a.value_dim) pair_value_tile<kRows, 1, true, kListed>(a, row, values, at);
  }
};

template <>
struct FewQueryProducts<VectorPairs> {
  using Query = uint16_t;
  struct Session {
    void take_rows(int64_t) {}
  };

  static constexpr int64_t kStepKeys = 2, kSpareRows = 0;
  static int64_t sums_rows(int64_t rows) { return rows; }

  static int64_t queries_size(const AttentionParams& p, int64_t rows) {
    return rows * padded_query<StoredPairs>(p.head_dim);
  }
  static void load_queries(const AttentionParams& p, const FewQueries& some, Query* to) {
    const int64_t size = queries_size(p, 1);
    for (int64_t head = some.head; head < some.head + some.heads; ++head) {
      const auto* from =
          static_cast<const uint16_t*>(p.query.data) + p.query.offset(some.batch, head, some.query);
      for (int64_t i = 0; i < some.queries; ++i, to += size, from += p.query.stride[2]) {
        memcpy(to, from, static_cast<size_t>(p.head_dim) * sizeof(Query));
        memset(to + p.head_dim, 0, static_cast<size_t>(size - p.head_dim) * sizeof(Query));
      }
    }
  }

  template <bool kListed = false>
  static void scores(const AttentionParams& p, const Query* query, int64_t rows, const FewQueryRows& keys,
                     float* s, int64_t ld) {
    few_query_scores_as<float, StoredPairs, kListed>(query, rows, keys, p.head_dim, s, ld, 1);
    const __m512 scale = _mm512_set1_ps(static_cast<float>(p.scale));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < keys.count; j += 16) {
        const __mmask16 mask = lanes_below(keys.count - j);
        float* to = s + r * ld + j;
        _mm512_mask_storeu_ps(to, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, to), scale));
      }
    }
  }

  static float round_weights(int64_t keys, float* weights) { return round_to_pairs(keys, weights); }

  using Values = PairValues;
  static Values weigh(const float* weights, const float* visible, int64_t ld, int64_t value_dim, float* sums,
                      int64_t ld_sums) {
    return {reinterpret_cast<const uint32_t*>(weights), visible, ld, value_dim, sums, ld_sums};
  }
  template <bool kListed = false>
  static void values(const Values& a, int64_t rows, const FewQueryRows& values) {
    few_query_value_steps<kListed>(PairColumns(), a, rows, values);
  }
  static SELFATTN_INLINE __m512 load_sums(const float* sums, int64_t column) {
    return _mm512_loadu_ps(sums + column);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
