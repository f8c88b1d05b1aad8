// Named barriers, for some of the warps of a block (bar.sync and bar.arrive).
#pragma once

#include <string>

#include "site.h"

namespace selfattn::emulator::named {

void start_block();
// Is called when all threads have ended. Reports barriers that some threads have come to and others have not.
void end_block();

// Is a collective of a warp. With `waits`, it returns when `threads` threads have come.
void come(int number, int threads, bool waits, const Site& site);

// Returns a line for each barrier that some threads have come to.
std::string what_barriers_lack();

}  // namespace selfattn::emulator::named
