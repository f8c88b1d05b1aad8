// The loops of peak.h for AVX-512.
#if defined(__x86_64__)

#include "peak.h"

#define SELFATTN_ISA avx512

#include "../cpu/isa/begin_avx512.h"
#include "../cpu/isa/simd_avx512.h"
#include "peak_loops.h"
#include "../cpu/isa/end_target.h"

namespace selfattn::cpu {
extern const PeakLoops kPeakAvx512;
const PeakLoops kPeakAvx512 = avx512::peak_loops("avx512");
}  // namespace selfattn::cpu

#endif
