// Barriers of some warps of a block (bar.sync and bar.arrive).
#pragma once

#include "site.h"

namespace selfattn::emulator::named {

void start_block();
// All threads have ended: reports barriers that some have come to and others not.
void end_block();

// Collective of a warp. `waits`: until as many threads have come.
void come(int number, int threads, bool waits, const Site& site);

}  // namespace selfattn::emulator::named
