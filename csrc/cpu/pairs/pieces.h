// Numbers as sums of bfloat16 pieces: x = x0 + x1 + x2. A piece has 8 significant bits, so two pieces hold a
// float16 exactly and three a float32. A product of two such sums, cut off after the terms that matter, is a
// few products of bfloat16 numbers summed in float32, which is what matrix units compute (Henry, Tang and
// Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations").
//
// Pieces are stored in pairs: a 32-bit word holds two neighbours along the dimension that the product sums
// over, the first in the low half.
#pragma once

#include "../products/arena.h"
#include "../products/operands.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int kMaxPieces = 3;
constexpr int64_t kLeastHeadDim = 16;  // with less, padding to whole steps costs more than pairs save

// Operands are padded with zeros to whole steps of tiles; engines without tiles stop at the last pair.
constexpr int64_t kDepthStep = 32;
inline int64_t padded_depth(int64_t depth) { return round_up(depth, kDepthStep); }
inline int64_t padded_pairs(int64_t depth) { return padded_depth(depth) / 2; }
inline int64_t product_pairs(int64_t depth) {
  return PairEngine::kTiles ? padded_pairs(depth) : (depth + 1) / 2;
}
inline int64_t padded_rows(int64_t rows) { return round_up(rows, 16); }

// 32 numbers as two vectors of float.
struct Numbers {
  __m512 first, second;
};

SELFATTN_INLINE __mmask16 lanes_below(int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffff) : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

// A mask of the first n of 32 bfloat16 elements; n is not negative.
SELFATTN_INLINE __mmask32 elements_below(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint32_t{1} << n) - 1);
}

// Loads the first n of 16 neighbouring elements as float, and reads nothing beyond them.
SELFATTN_INLINE __m512 load_16(const void* data, DType dtype, int64_t n) {
  const __mmask16 mask = lanes_below(n);
  if (dtype == DType::kFloat32) return _mm512_maskz_loadu_ps(mask, data);
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, data);
  if (dtype == DType::kFloat16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

SELFATTN_INLINE Numbers load_32(const void* row, DType dtype, int64_t column, int64_t columns) {
  const int64_t n = columns - column;
  return {load_16(element(row, dtype, column), dtype, n),
          n > 16 ? load_16(element(row, dtype, column + 16), dtype, n - 16) : _mm512_setzero_ps()};
}

// Returns x rounded to bfloat16, in order; x keeps what the rounding took away.
SELFATTN_INLINE __m512i take_piece(Numbers& x) {
  const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(x.second, x.first);
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, 1));
  x.first = _mm512_sub_ps(x.first, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
  x.second = _mm512_sub_ps(x.second, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
  return bits;
}

// Pairs the high halves of two rows, which cuts both off to bfloat16.
SELFATTN_INLINE __m512i high_halves(__m512i above, __m512i below) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(above, 16), below);
}

SELFATTN_INLINE __m512i plus_half(__m512 x) {  // half of the last bit that bfloat16 keeps
  return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
}

// Stores two rows in pieces, to[piece]. From piece kFirstRounded on they are rounded by integer operations,
// which cost a fraction of a conversion: half of the last bit is added, and the bits below it are cut off.
// This may make Inf of the largest numbers and lose a NaN, but neither has pieces anyway (are_ordinary).
template <int kPieces, int kFirstRounded>
SELFATTN_INLINE void store_pieces(uint32_t* to, int64_t piece_stride, __m512 above, __m512 below) {
  if constexpr (kPieces == 1) {
    _mm512_storeu_si512(to, pair_rows(above, below));
    return;
  }
  SELFATTN_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const bool rounded = piece >= kFirstRounded;
    const __m512i a = rounded ? plus_half(above) : _mm512_castps_si512(above);
    const __m512i b = rounded ? plus_half(below) : _mm512_castps_si512(below);
    _mm512_storeu_si512(to + piece * piece_stride, high_halves(a, b));
    above = _mm512_sub_ps(above, second_of_pairs(a));
    below = _mm512_sub_ps(below, second_of_pairs(b));
  }
}

template <int kPieces>
SELFATTN_INLINE void store_row_pair(uint32_t* to, int64_t piece_stride, __m512 above, __m512 below) {
  store_pieces<kPieces, 0>(to, piece_stride, above, below);
}

// Does the same for weights and their gradients. This is repeated for every strip and block, so all pieces
// but the last are cut off without rounding: three pieces hold all 24 bits, two hold 15 bits and a rounded
// one. The part that a product with another operand leaves out then grows to 2^-23 of a term, of either sign
// as long as the other operand's pieces are rounded. A third piece is exact; a NaN is in the first piece.
template <int kPieces>
SELFATTN_INLINE void store_weight_pair(uint32_t* to, int64_t piece_stride, __m512 above, __m512 below) {
  store_pieces<kPieces, kPieces == 2 ? 1 : kPieces>(to, piece_stride, above, below);
}

// Sums over values below 2^kLargeExponent are finite, whatever the keys are and however far a maximum lags
// behind its scores.
constexpr int kLargeExponent = 64;

// The bits of 2^exponent as a float.
constexpr int power_of_two(int exponent) { return (127 + exponent) << 23; }

SELFATTN_INLINE __m512i magnitude_bits(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

// Whether the pieces of numbers of these magnitudes, and products of two pieces, are all 0 or of middling
// size; outside that range they overflow or vanish.
SELFATTN_INLINE bool are_ordinary(__m512i magnitudes, int least_bits) {
  const __m512i least = _mm512_set1_epi32(least_bits);
  const __mmask16 outside = _mm512_cmpgt_epu32_mask(_mm512_sub_epi32(magnitudes, least),
                                                    _mm512_set1_epi32(power_of_two(60) - least_bits));
  return (outside & _mm512_test_epi32_mask(magnitudes, magnitudes)) == 0;
}

SELFATTN_INLINE bool is_finite_bfloat16(__m512i bits) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent) == 0;
}

// Whether a row may be represented by its pieces. Its largest number must not be too small either, since
// gradients multiply products of two rows by a third row, and must be as exact as those products. A single
// piece holds NaN and Inf as they are, but a weight of 0 must not meet them.
SELFATTN_OUT_OF_LINE inline bool is_ordinary_row(const RowSource& s, int64_t row, int pieces) {
  const void* data = element(s.data, s.dtype, row * s.stride);
  bool ordinary = true;
  // The mean over a large batch makes gradients of 1e-12, for which the slow way must not be taken. Products
  // of gradients with data still have all pieces from 2^-60 on; a number far smaller than the largest of its
  // row may lose its last pieces.
  const int least = power_of_two(s.is_gradient ? -110 : -80);
  const int least_largest = power_of_two(s.is_gradient ? -60 : -40);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t column = 0; column < s.columns; column += 32) {
    Numbers x = load_32(data, s.dtype, column, s.columns);
    if (pieces == 1) {
      ordinary &= is_finite_bfloat16(take_piece(x));
      continue;
    }
    const __m512i first = magnitude_bits(x.first), second = magnitude_bits(x.second);
    ordinary &= are_ordinary(first, least) && are_ordinary(second, least);
    largest = _mm512_max_epu32(largest, _mm512_max_epu32(first, second));
  }
  const unsigned most = _mm512_reduce_max_epu32(largest);
  return ordinary && (most == 0 || most >= static_cast<unsigned>(least_largest));
}

// Bounds of the magnitudes of many numbers, gathered while they are loaded. Rows are examined one by one only
// if these bounds do not suffice.
struct Magnitudes {
  __m512i largest, least;  // the least of magnitude - 1, which leaves out zeros

  static Magnitudes none() { return {_mm512_setzero_si512(), _mm512_set1_epi32(-1)}; }

  SELFATTN_INLINE void add(__m512 x) {
    const __m512i magnitude = magnitude_bits(x);
    largest = _mm512_max_epu32(largest, magnitude);
    least = _mm512_min_epu32(least, _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1)));
  }
  SELFATTN_INLINE void add(const Numbers& x) {
    add(x.first);
    add(x.second);
  }
  // Adds 32 bfloat16 numbers; used with one piece only. The other half of a word stays in the low bits, which
  // a comparison with a power of two ignores.
  SELFATTN_INLINE void add_bfloat16(__m512i bits) {
    const __m512i most =
        _mm512_max_epu32(magnitude_bits(first_of_pairs(bits)), magnitude_bits(_mm512_castsi512_ps(bits)));
    largest = _mm512_max_epu32(largest, most);
  }
  // Whether any number is 2^exponent or more.
  bool any_from(int exponent) const {
    return _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(power_of_two(exponent))) != 0;
  }
  // Returns true if every row is ordinary, false if some may not be.
  bool are_ordinary(int pieces, bool is_gradient) const {
    const int enough = power_of_two(is_gradient ? -60 : -40);
    return !any_from(pieces == 1 ? 127 : 60) &&
           (pieces == 1 || _mm512_cmplt_epu32_mask(least, _mm512_set1_epi32(enough - 1)) == 0);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
