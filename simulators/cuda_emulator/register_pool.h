// Registers that the warpgroups of a block hand over (setmaxnreg).
#pragma once

#include <string>

#include "site.h"

namespace selfattn::emulator::registers {

void start_block();

// Is a collective of a warpgroup, whose threads have `count` registers each afterwards: it gives some up, or
// waits until there are enough.
void set(int count, bool takes, const Site& site);

// Returns a line for each warpgroup that waits for registers.
std::string what_groups_lack();

}  // namespace selfattn::emulator::registers
