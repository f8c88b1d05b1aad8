// The fused kernel for any machine.
#define SELFATTN_ISA scalar

#include "begin_baseline.h"
#include "simd_scalar.h"
#include "../fused/fused_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedScalar;
const Kernel kFusedScalar =
    scalar::fused_kernel("scalar", "tiled online softmax, the compiler's 128-bit vectors");
}  // namespace selfattn::cpu
