// The loops of peak.h for the compiler's own 128-bit vectors.
#include "peak.h"

#define SELFATTN_ISA scalar

#include "../cpu/isa/begin_baseline.h"
#include "../cpu/isa/simd_scalar.h"
#include "peak_loops.h"
#include "../cpu/isa/end_target.h"

namespace selfattn::cpu {
extern const PeakLoops kPeakScalar;
const PeakLoops kPeakScalar = scalar::peak_loops("scalar");
}  // namespace selfattn::cpu
