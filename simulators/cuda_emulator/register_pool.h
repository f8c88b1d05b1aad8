// Registers that the warpgroups of a block hand over (setmaxnreg).
#pragma once

#include <string>

#include "site.h"

namespace selfattn::emulator::registers {

void start_block();

// Collective of a warpgroup, which has `count` registers a thread afterwards: it gives up some, or waits
// until there are enough.
void set(int count, bool takes, const Site& site);

// One line for each warpgroup that waits for registers.
std::string what_groups_lack();

}  // namespace selfattn::emulator::registers
