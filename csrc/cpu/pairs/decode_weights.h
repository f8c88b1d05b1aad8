// Weights of decoding by pairs, for decode_by_vectors.h and decode_by_tiles.h.
#pragma once

#include "operands_of_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Two arithmetics: by instructions for vectors, and for tiles.
struct VectorPairs {};
struct TilePairs {};
template <>
constexpr bool kDirect<VectorPairs> = false;
template <>
struct ScalarOf<VectorPairs> {
  using type = float;
};
template <>
struct ScalarOf<TilePairs> {
  using type = float;
};

// Turns a row of weights into words of two, in place, with zeros up to a multiple of 32. Returns the factor
// for their product with values that makes the rounded weights sum up to what they were before.
inline float round_to_pairs(int64_t keys, float* weights) {
  __m512 sum = _mm512_setzero_ps(), rounded_sum = sum;
  for (int64_t j = 0; j < keys; j += 32) {
    const __m512 first = _mm512_loadu_ps(weights + j);
    const __m512 second = j + 16 < keys ? _mm512_loadu_ps(weights + j + 16) : _mm512_setzero_ps();
    const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    sum = _mm512_add_ps(sum, _mm512_add_ps(first, second));
    rounded_sum = PairEngine::add_pairs(rounded_sum, bits);
    _mm512_storeu_si512(weights + j / 2, bits);
  }
  const float before = _mm512_reduce_add_ps(sum), after = _mm512_reduce_add_ps(rounded_sum);
  return after == 0.0f ? 1.0f : before / after;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
