// The loops of peak.h for NEON.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "peak.h"

#define SELFATTN_ISA neon

#include "../cpu/isa/begin_baseline.h"
#include "../cpu/isa/simd_neon.h"
#include "peak_loops.h"
#include "../cpu/isa/end_target.h"

namespace selfattn::cpu {
extern const PeakLoops kPeakNeon;
const PeakLoops kPeakNeon = neon::peak_loops("neon");
}  // namespace selfattn::cpu

#endif
