// Products of bfloat16 pairs by VDPBF16PS. The tile of accumulators is that of tile_multiply.h, with a pair
// in the place of a number. Where the instruction runs at the rate of a multiply-add (AMD Zen 4 and 5), it
// does twice the work.
#pragma once

#include "pair_product.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct PairEngine {
  static constexpr bool kTiles = false;  // A may have its pairs anywhere
  static constexpr int kMostPieces = 1;  // three products at twice the rate are slower than one in float
  static constexpr bool kDecodesDirect = false;  // kFusedAvx512 is as good

  // Returns sum + first + second for each pair.
  SELFATTN_INLINE static __m512 add_pairs(__m512 sum, __m512i bits) {
    return _mm512_dpbf16_ps(sum, (__m512bh)bits, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // 1 and 1
  }

  // Rounds two rows of weights to bfloat16, returns them in pairs, and adds the rounded weights to `sum`.
  SELFATTN_INLINE static __m512i round_weights(__m512 above, __m512 below, __m512& sum) {
    const __m512i bits = pair_rows(above, below);
    sum = add_pairs(sum, bits);
    return bits;
  }

  // With Update::kAdd the sums go on in the registers, as they do in tiles, so that one product gives the
  // same bits as several after another.
  template <int kRows, int kVecs>
  __attribute__((noinline)) static void multiply_tile(const PairProduct& p, int64_t row, int64_t lane) {
    static_assert(kMostPieces == 1, "only one piece of A and B is multiplied");
    const bool goes_on = p.update == Update::kAdd;
    float* c = p.c + row * p.ldc + lane;
    __m512 sum[kRows][kVecs];
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[r][v] = _mm512_setzero_ps();
    }
    if (goes_on) {
      SELFATTN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        SELFATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) sum[r][v] = _mm512_loadu_ps(c + r * p.ldc + v * 16);
      }
    }
    const uint32_t* a = p.a + row * p.a_row;
    const uint32_t* b = p.b + lane;
    const int64_t a_row = p.a_row, a_pair = p.a_pair, b_pair = p.b_pair;
    for (int64_t k = p.pairs; k > 0; --k) {
      __m512bh vec[kVecs];
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) vec[v] = (__m512bh)_mm512_loadu_si512(b + v * 16);
      SELFATTN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * a_row]));
        SELFATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], broadcast, vec[v]);
      }
      a += a_pair;
      b += b_pair;
    }
    if (p.update == Update::kScaleAdd) {
      finish_tile<float, Update::kScaleAdd>(sum, c, p.ldc, p.lane_scale + lane);
    } else {
      finish_tile<float, Update::kStore>(sum, c, p.ldc, nullptr);
    }
  }

  template <int kVecs>
  static void multiply_rows(const PairProduct& p, int64_t rows, int64_t lane) {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) multiply_tile<8, kVecs>(p, row, lane);
    if (row + 4 <= rows) {
      multiply_tile<4, kVecs>(p, row, lane);
      row += 4;
    }
    for (; row < rows; ++row) multiply_tile<1, kVecs>(p, row, lane);
  }

  static void multiply(const PairProduct& p, int64_t rows, int64_t vecs) {
    for (int64_t vec = 0; vec < vecs;) {
      const int take = next_tile_vecs<float>(vecs - vec);
      if (take == 3) {
        multiply_rows<3>(p, rows, vec * 16);
      } else if (take == 2) {
        multiply_rows<2>(p, rows, vec * 16);
      } else {
        multiply_rows<1>(p, rows, vec * 16);
      }
      vec += take;
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
