// A product of matrices in bfloat16 pairs, as the engines (engine_*.h) compute it.
//
//     C(row, lane)  (=, +=, or scaled +=)  sum over the depth of A(row, .) * B(., lane)
//
// A and B are sums of pieces in pairs (pieces.h). Products of the smallest pieces may be left out, since they
// are below the rounding of what is kept.
#pragma once

#include "../products/tile_multiply.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct PairProduct {
  int pieces;
  int order;      // products of pieces i and j are taken where i + j < order
  int64_t pairs;  // depth / 2; whole steps for an engine of tiles

  // Distances from one row, pair or piece to the next, in pairs.
  const uint32_t* a;
  int64_t a_row, a_pair = 1, a_piece;
  const uint32_t* b;
  int64_t b_pair, b_piece;

  float* c;
  int64_t ldc;
  Update update = Update::kStore;
  const float* lane_scale = nullptr;  // for Update::kScaleAdd alone
};

// Interleaves the two halves of a vector of bfloat16, element by element.
SELFATTN_INLINE __m512i interleave_halves(__m512i bits) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, bits);
}

// Interleaves 16 elements of each of two vectors of bfloat16, from element kFirst on.
template <int kFirst>
SELFATTN_INLINE __m512i interleave_rows(__m512i above, __m512i below) {
  const __m512i order =
      _mm512_add_epi16(_mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                        38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0),
                       _mm512_set1_epi16(kFirst));
  return _mm512_permutex2var_epi16(above, order, below);
}

// Rounds two rows to bfloat16 and puts elements of the same column side by side, `above` in the low halves.
SELFATTN_INLINE __m512i pair_rows(__m512 above, __m512 below) {
  return interleave_halves((__m512i)_mm512_cvtne2ps_pbh(below, above));
}

SELFATTN_INLINE __m512 first_of_pairs(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
SELFATTN_INLINE __m512 second_of_pairs(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
}

}  // namespace selfattn::cpu::SELFATTN_ISA
