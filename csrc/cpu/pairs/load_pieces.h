// Loads rows of a tensor as pieces (pieces.h), in the layouts of operands_of_pairs.h. The magnitudes of what
// is loaded are gathered on the way.
#pragma once

#include "pieces.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <int kCount>
struct PieceCount {
  static constexpr int value = kCount;
};
template <class Body>
void with_pieces(int pieces, const Body& body) {
  if constexpr (PairEngine::kMostPieces > 1) {
    if (pieces == 2) return body(PieceCount<2>{});
    if (pieces == 3) return body(PieceCount<3>{});
  }
  body(PieceCount<1>{});
}

// Rows are prefetched this far ahead where they are loaded one or two at a time.
constexpr int64_t kRowsAhead = 16;

// Stores 32 neighbouring numbers of a row as pairs along the depth of K Q^T. With one piece, which may also
// be used where it lies in memory, a pair is two neighbours; otherwise it is two numbers that are 16 apart,
// which needs no shuffling. load_row_pieces and load_lane_pieces must agree on this.
template <int kPieces>
SELFATTN_INLINE void store_numbers(uint32_t* to, int64_t piece_stride, Numbers x) {
  if constexpr (kPieces == 1) {
    _mm512_storeu_si512(to, take_piece(x));
  } else {
    store_row_pair<kPieces>(to, piece_stride, x.first, x.second);
  }
}

// Fills to[piece][row][padded depth]: rows one after another, zeros up to whole steps, and the number of rows
// padded to 16.
template <int kPieces>
void load_row_pieces(uint32_t* to, int64_t piece_stride, const RowSource& s, Magnitudes& seen) {
  const int64_t pairs = padded_pairs(s.columns);
  for (int64_t row = 0; row < padded_rows(s.rows); ++row) {
    if (row < s.rows) ask_for_rows(s, row + kRowsAhead, 1);
    for (int64_t pair = 0; pair < pairs; pair += 16) {
      Numbers x{_mm512_setzero_ps(), _mm512_setzero_ps()};
      if (row < s.rows) x = load_32(element(s.data, s.dtype, row * s.stride), s.dtype, 2 * pair, s.columns);
      if constexpr (kPieces > 1) seen.add(x);
      store_numbers<kPieces>(to + row * pairs + pair, piece_stride, x);
    }
  }
}

SELFATTN_INLINE void store_transposed_pairs(uint32_t* to, int64_t ld, __m512i (&rows)[16]) {
  __m512 tile[16];
  SELFATTN_UNROLL
  for (int i = 0; i < 16; ++i) tile[i] = _mm512_castsi512_ps(rows[i]);
  transpose<float>(tile);
  SELFATTN_UNROLL
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(to + i * ld, tile[i]);
}

// The numbers at the same place of two tiles become a pair.
template <int kPieces>
SELFATTN_INLINE void store_transposed_pieces(uint32_t* to, int64_t ld, int64_t piece_stride,
                                             __m512 (&above)[16], __m512 (&below)[16]) {
  transpose<float>(above);
  transpose<float>(below);
  SELFATTN_UNROLL
  for (int i = 0; i < 16; ++i) store_row_pair<kPieces>(to + i * ld, piece_stride, above[i], below[i]);
}

// Loads 32 numbers of a bfloat16 row, which are their own only piece; a row past the end or marked as special
// gives zeros.
SELFATTN_INLINE __m512i load_32_bfloat16(const RowSource& s, int64_t row, int64_t column,
                                         const bool* special) {
  if (row >= s.rows || (special != nullptr && special[row])) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(elements_below(s.columns - column),
                                  element(s.data, DType::kBFloat16, row * s.stride + column));
}

// Does load_lane_pieces for bfloat16 rows. The factor is a power of two, so it does not round.
inline void load_bfloat16_lanes(uint32_t* to, const RowSource& s, float factor) {
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t lane = 0; lane < s.rows; lane += 16) {
    for (int64_t pair = 0; pair < padded_pairs(s.columns); pair += 16) {
      __m512i both[16];
      for (int i = 0; i < 16; ++i) {
        both[i] = load_32_bfloat16(s, lane + i, 2 * pair, nullptr);
        if (factor == 1.0f) continue;
        const __m512 first = _mm512_mul_ps(first_of_pairs(both[i]), factors);
        const __m512 second = _mm512_mul_ps(second_of_pairs(both[i]), factors);
        both[i] = high_halves(_mm512_castps_si512(first), _mm512_castps_si512(second));
      }
      store_transposed_pairs(to + pair * kLanes<float> + lane, kLanes<float>, both);
    }
  }
}

// Fills to[piece][pair of columns][lane] with one row per lane, times the factor, and zeros in the lanes up
// to a whole vector.
template <int kPieces>
void load_lane_pieces(uint32_t* to, int64_t piece_stride, const RowSource& s, float factor,
                      Magnitudes& seen) {
  if (kPieces == 1 && s.dtype == DType::kBFloat16) return load_bfloat16_lanes(to, s, factor);
  const __m512 factors = _mm512_set1_ps(factor);
  const int64_t pairs = padded_pairs(s.columns);
  for (int64_t lane = 0; lane < s.rows; lane += 16) {
    for (int64_t pair = 0; pair < pairs; pair += 16) {
      __m512 first[16], second[16];
      __m512i both[16];
      for (int i = 0; i < 16; ++i) {
        Numbers x{_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (lane + i < s.rows) {
          x = load_32(element(s.data, s.dtype, (lane + i) * s.stride), s.dtype, 2 * pair, s.columns);
          if constexpr (kPieces > 1) seen.add(x);
          x = {_mm512_mul_ps(x.first, factors), _mm512_mul_ps(x.second, factors)};
        }
        if constexpr (kPieces == 1) both[i] = take_piece(x);
        first[i] = x.first;
        second[i] = x.second;
      }
      uint32_t* at = to + pair * kLanes<float> + lane;
      if constexpr (kPieces == 1) {
        store_transposed_pairs(at, kLanes<float>, both);
      } else {
        store_transposed_pieces<kPieces>(at, kLanes<float>, piece_stride, first, second);
      }
    }
  }
}

// Loads 16 numbers of a row from a column on, as many as there are; a row past the end or marked as special
// gives zeros.
SELFATTN_INLINE __m512 load_unless_special(const RowSource& s, int64_t row, int64_t column,
                                           const bool* special) {
  if (row >= s.rows || (special != nullptr && special[row])) return _mm512_setzero_ps();
  return load_16(element(s.data, s.dtype, row * s.stride + column), s.dtype, s.columns - column);
}

// Fills to[piece][pair of rows][ld]: rows as they are, two at a time, with zeros up to whole steps of rows
// and whole vectors of columns. Rows marked as special become zeros. The rows of a pair are neighbours or,
// with several pieces, 16 apart, like those of WeightOperand.
template <int kPieces>
void load_row_pair_pieces(uint32_t* to, int64_t ld, int64_t piece_stride, const RowSource& s,
                          const bool* special, Magnitudes& seen) {
  for (int64_t pair = 0; pair < padded_pairs(s.rows); ++pair) {
    if (2 * pair < s.rows) ask_for_rows(s, 2 * pair + kRowsAhead, 2);
    if (kPieces == 1 && s.dtype == DType::kBFloat16) {
      for (int64_t column = 0; column < ld; column += 32) {
        const __m512i above = load_32_bfloat16(s, 2 * pair, column, special);
        const __m512i below = load_32_bfloat16(s, 2 * pair + 1, column, special);
        seen.add_bfloat16(above);
        seen.add_bfloat16(below);
        uint32_t* row = to + pair * ld + column;
        _mm512_storeu_si512(row, interleave_rows<0>(above, below));
        if (column + 16 < ld) _mm512_storeu_si512(row + 16, interleave_rows<16>(above, below));
      }
      continue;
    }
    const int64_t above_row = kPieces == 1 ? 2 * pair : pair / 16 * 32 + pair % 16;
    for (int64_t column = 0; column < ld; column += 16) {
      const __m512 above = load_unless_special(s, above_row, column, special);
      const __m512 below = load_unless_special(s, above_row + (kPieces == 1 ? 1 : 16), column, special);
      seen.add({above, below});
      store_row_pair<kPieces>(to + pair * ld + column, piece_stride, above, below);
    }
  }
}

// Does load_column_pieces for 32 bfloat16 rows from `row` on, which are 16 pairs of each column.
inline void load_bfloat16_columns(uint32_t* to, int64_t ld, const RowSource& s, int64_t row,
                                  const bool* special, Magnitudes& seen) {
  for (int64_t column = 0; column < s.columns; column += 32) {
    __m512i low[16], high[16];
    SELFATTN_UNROLL
    for (int i = 0; i < 16; ++i) {
      const __m512i above = load_32_bfloat16(s, row + 2 * i, column, special);
      const __m512i below = load_32_bfloat16(s, row + 2 * i + 1, column, special);
      seen.add_bfloat16(above);
      seen.add_bfloat16(below);
      low[i] = _mm512_unpacklo_epi16(above, below);
      high[i] = _mm512_unpackhi_epi16(above, below);
    }
    __m512 tile[2][16];
    SELFATTN_UNROLL
    for (int i = 0; i < 16; ++i) tile[0][i] = _mm512_castsi512_ps(low[i]);
    transpose<float>(tile[0]);
    SELFATTN_UNROLL
    for (int i = 0; i < 16; ++i) tile[1][i] = _mm512_castsi512_ps(high[i]);
    transpose<float>(tile[1]);
    // Interleaving works within quarters of a vector, so `low` holds four of every eight columns.
    SELFATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      SELFATTN_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int64_t at = column + i / 4 * 8 + half * 4 + i % 4;
        if (at < padded_rows(s.columns)) _mm512_storeu_ps(to + at * ld, tile[half][i]);
      }
    }
  }
}

// Fills to[piece][column][ld pairs of rows]: one row of the result per column, with zeros as in
// load_row_pair_pieces.
template <int kPieces>
void load_column_pieces(uint32_t* to, int64_t ld, int64_t piece_stride, const RowSource& s,
                        const bool* special, Magnitudes& seen) {
  const int64_t pairs = padded_pairs(s.rows);
  for (int64_t pair = 0; pair < pairs; pair += 16) {
    if (2 * pair < s.rows) ask_for_rows(s, 2 * pair + kDepthStep, kDepthStep);  // the rows of the next step
    if (kPieces == 1 && s.dtype == DType::kBFloat16) {
      load_bfloat16_columns(to + pair, ld, s, 2 * pair, special, seen);
      continue;
    }
    for (int64_t column = 0; column < s.columns; column += 16) {
      __m512 above[16], below[16];
      __m512i both[16];
      for (int i = 0; i < 16; ++i) {
        above[i] = load_unless_special(s, 2 * (pair + i), column, special);
        below[i] = load_unless_special(s, 2 * (pair + i) + 1, column, special);
        seen.add({above[i], below[i]});
        if constexpr (kPieces == 1) both[i] = pair_rows(above[i], below[i]);
      }
      uint32_t* at = to + column * ld + pair;
      if constexpr (kPieces == 1) {
        store_transposed_pairs(at, ld, both);
      } else {
        store_transposed_pieces<kPieces>(at, ld, piece_stride, above, below);
      }
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
