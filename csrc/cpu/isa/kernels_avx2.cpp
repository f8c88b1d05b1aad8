// The fused kernel for AVX2 with FMA.
#if defined(__x86_64__)

#define SELFATTN_ISA avx2

#include "begin_avx2.h"
#include "simd_avx2.h"
#include "../fused/fused_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedAvx2;
const Kernel kFusedAvx2 = avx2::fused_kernel("avx2", "tiled online softmax, 256-bit vectors");
}  // namespace selfattn::cpu

#endif
