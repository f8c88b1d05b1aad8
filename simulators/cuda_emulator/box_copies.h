// Copies of boxes of tensors to shared memory by tensor maps (TMA). When they happen between their issue and
// the wait for their barrier is up to the options; until then the destination holds NaN.
#pragma once

#include <cstdint>

#include "site.h"

namespace selfattn::emulator::boxes {

void start_block();

// `corner`: where the box begins, the innermost dimension first.
void copy(void* shared, const void* map, void* barrier, const int (&corner)[4], const Site& site);

// Somebody waits for this barrier, which lacks nothing but bytes: copies to it complete, in their order,
// until its phase ends.
void complete_for(void* barrier);
// Time passes: some copies may complete.
void pass();

}  // namespace selfattn::emulator::boxes
