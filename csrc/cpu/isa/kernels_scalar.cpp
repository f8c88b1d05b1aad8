// The fused kernel for any machine.
#include "simd_common.h"

#define SELFATTN_ISA scalar
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#endif

#include "simd_scalar.h"

#include "../fused/fused_kernel.h"

#if !defined(__clang__)
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const Kernel kFusedScalar;
const Kernel kFusedScalar =
    scalar::fused_kernel("scalar", "tiled online softmax, the compiler's 128-bit vectors");
}  // namespace selfattn::cpu
