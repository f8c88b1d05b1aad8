// Barriers of some warps of a block (bar.sync and bar.arrive).
#pragma once

#include <string>

#include "site.h"

namespace selfattn::emulator::named {

void start_block();
// All threads have ended: reports barriers that some have come to and others not.
void end_block();

// Collective of a warp. `waits`: until as many threads have come.
void come(int number, int threads, bool waits, const Site& site);

// One line for each barrier that some have come to.
std::string what_barriers_lack();

}  // namespace selfattn::emulator::named
