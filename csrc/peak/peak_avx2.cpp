// The loops of peak.h for AVX2 with FMA.
#if defined(__x86_64__)

#include "peak.h"

#define SELFATTN_ISA avx2

#include "../cpu/isa/begin_avx2.h"
#include "../cpu/isa/simd_avx2.h"
#include "peak_loops.h"
#include "../cpu/isa/end_target.h"

namespace selfattn::cpu {
extern const PeakLoops kPeakAvx2;
const PeakLoops kPeakAvx2 = avx2::peak_loops("avx2");
}  // namespace selfattn::cpu

#endif
