// Places of a kernel as small numbers, for the race detector to keep many of.
#pragma once

#include <cstdint>
#include <string>

#include "site.h"

namespace selfattn::emulator {

uint32_t number_of_place(const Site& site);
uint32_t number_of_place(const void* program_counter);

// Returns the place with file and line, if addr2line finds them.
std::string text_of_place(uint32_t number);

}  // namespace selfattn::emulator
