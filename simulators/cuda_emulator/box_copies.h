// Copies of boxes of tensors to shared memory by tensor maps (TMA). The options say when a copy happens,
// between its issue and the wait for its barrier; until then the destination holds NaN.
#pragma once

#include <cstdint>

#include "site.h"

namespace selfattn::emulator::boxes {

void start_block();

// Begins a copy. `corner` is where the box begins, the innermost dimension first.
void copy(void* shared, const void* map, void* barrier, const int (&corner)[4], const Site& site);

// Completes copies to this barrier, in their order, until its phase ends. To be called when a thread waits
// for a barrier that lacks nothing but bytes.
void complete_for(void* barrier);
// Lets time pass, so that some copies may complete.
void pass();

}  // namespace selfattn::emulator::boxes
