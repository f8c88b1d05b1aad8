// What a pair engine is asked for: C(row, lane) (=, +=, or scaled +=) sum over the depth of A(row, .) * B(.,
// lane), where A and B are sums of bfloat16 pieces in pairs (pieces.h). Products of the smallest pieces may
// be left out: they are below the rounding of what is kept.
#pragma once

#include "../products/tile_multiply.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct PairProduct {
  int pieces;
  int order;          // products of pieces i and j are taken where i + j < order
  const uint32_t* a;  // strides count pairs
  int64_t a_row, a_pair, a_piece;
  const uint32_t* b;
  int64_t ldb, b_piece;
  int64_t pairs;  // depth / 2; whole steps for an engine of tiles
  float* c;
  int64_t ldc;
  Update update;
  const float* lane_scale;
};

// Two rows rounded to bfloat16, elements of the same column side by side, `above` in the low halves.
SELFATTN_INLINE __m512i pair_rows(__m512 above, __m512 below) {
  const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(below, above);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, bits);
}

SELFATTN_INLINE __m512 first_of_pairs(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
SELFATTN_INLINE __m512 second_of_pairs(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
}

}  // namespace selfattn::cpu::SELFATTN_ISA
