// The multiply-adds of peak.h for AVX512_BF16. VDPBF16PS adds products of two pairs of bfloat16 to a float in
// each lane.
#if defined(__x86_64__)

#include "peak.h"

#include "../cpu/isa/begin_avx512_bf16.h"

namespace selfattn::cpu {
namespace {

constexpr int kRows = 3;  // rows and chains as in peak_loops.h
constexpr int kChains = 8;

float multiply_add(int64_t iterations) {
  __m512 sums[kRows][kChains];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int c = 0; c < kChains; ++c) sums[r][c] = _mm512_set1_ps(float(r * kChains + c));
  }
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(-0.5f), _mm512_set1_ps(0.75f));
  for (int64_t n = 0; n < iterations; ++n) {
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SELFATTN_UNROLL
      for (int c = 0; c < kChains; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], a, b);
    }
  }
  __m512 total = _mm512_setzero_ps();
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int c = 0; c < kChains; ++c) total = _mm512_add_ps(total, sums[r][c]);
  }
  return _mm512_cvtss_f32(total);
}

}  // namespace
}  // namespace selfattn::cpu

#include "../cpu/isa/end_target.h"

namespace selfattn::cpu {
extern const PeakLoops kPeakAvx512Bf16;
const PeakLoops kPeakAvx512Bf16 = {"avx512_bf16", 4.0 * kRows * kChains * 16, &multiply_add, nullptr,
                                   nullptr};
}  // namespace selfattn::cpu

#endif
