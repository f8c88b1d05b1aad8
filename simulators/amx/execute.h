// One decoded instruction executed for the calling thread.
#pragma once

#include <cstdint>

#include "instruction.h"

namespace amx_emulator {

// The general registers in the order of their encoding, rsp among them, as the instruction finds them.
constexpr int kRegisters = 16;

// `address` is where the instruction lies. Reads and writes memory as the instruction does, and counts it.
// Where the processor would raise #UD or #GP, a line on stderr says so and the process aborts. Allocates
// nothing, takes no lock.
void execute(const Instruction& instruction, uint64_t address, const uint64_t (&registers)[kRegisters]);

[[noreturn]] void die(const char* what, uint64_t address, const char* fault);

}  // namespace amx_emulator
