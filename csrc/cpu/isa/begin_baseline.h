// Opens a region for what every processor of the architecture has. Like the target regions of begin_*.h it
// fixes how the code is optimised, whatever flags the build has.
#pragma once

#include "simd_common.h"

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push
#else
// On arm64 gcc 12 schedules before it gives out registers, and then needs moves among the multiply-adds.
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off", "no-schedule-insns")
#endif
