// Opens a region for what every processor of the architecture has. Like the target regions of begin_*.h it
// fixes how the code is optimised, whatever flags the build has.
#pragma once

#include "simd_common.h"

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push
#else
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#endif
