// Selected keys in the fused kernel for any machine.
#define SELFATTN_ISA scalar

#include "begin_baseline.h"
#include "simd_scalar.h"
#include "../sparse/direct_selected.h"
#include "end_target.h"
