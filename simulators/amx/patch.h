// Patches an instruction so that it does not trap again.
#pragma once

#include <cstdint>

#include "instruction.h"

namespace amx_emulator {

// Replaces the instruction at `address`, which has just been executed, by a jump to code that executes it in
// the emulator and jumps back. It does nothing where that is impossible or not worth while; the instruction
// then traps again. It may be called from signal handlers and from any number of threads.
void patch(uint64_t address, const Instruction& instruction);

// Whether the bytes at `address` are a jump that patch() has written. A thread may meet the old bytes, trap,
// and find the new ones when its handler looks.
bool is_patched(uint64_t address);

}  // namespace amx_emulator
