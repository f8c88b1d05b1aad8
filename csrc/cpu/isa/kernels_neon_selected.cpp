// Selected keys in the fused kernel for NEON.
#if defined(__aarch64__)

#define SELFATTN_ISA neon

#include <arm_neon.h>

#include "begin_baseline.h"
#include "simd_neon.h"
#include "../sparse/direct_selected.h"
#include "end_target.h"

#endif
