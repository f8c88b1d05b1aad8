// The fused kernel for AVX-512.
#if defined(__x86_64__)

#define SELFATTN_ISA avx512

#include "begin_avx512.h"
#include "simd_avx512.h"
#include "../fused/fused_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedAvx512;
const Kernel kFusedAvx512 = avx512::fused_kernel("avx512", "tiled online softmax, 512-bit vectors");

void mend_overflow_avx512(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch,
                          int64_t head, int64_t first, int64_t count);
void mend_overflow_avx512(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch,
                          int64_t head, int64_t first, int64_t count) {
  avx512::by_type<avx512::mend_overflow<double>, avx512::mend_overflow<float>>(p, outputs, batch, head, first,
                                                                               count);
}
}  // namespace selfattn::cpu

#endif
