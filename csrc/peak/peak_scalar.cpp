// The loops of peak.h for the compiler's own 128-bit vectors: SSE2, NEON.
#include "../cpu/isa/simd_common.h"
#include "peak.h"

#define SELFATTN_ISA scalar
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif

#include "../cpu/isa/simd_scalar.h"

#include "peak_loops.h"

#if !defined(__clang__)
#pragma GCC pop_options
#endif

namespace selfattn::cpu {
extern const PeakLoops kPeakScalar;
const PeakLoops kPeakScalar = scalar::peak_loops("scalar");
}  // namespace selfattn::cpu
