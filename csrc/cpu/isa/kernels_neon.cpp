// The fused kernel for NEON, which every arm64 processor has.
#if defined(__aarch64__)

#define SELFATTN_ISA neon

#include <arm_neon.h>

#include "begin_baseline.h"
#include "simd_neon.h"
#include "../fused/fused_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedNeon;
const Kernel kFusedNeon = neon::fused_kernel("neon", "tiled online softmax, 128-bit vectors of NEON");
}  // namespace selfattn::cpu

#endif
