// Executes one decoded instruction for the calling thread.
#pragma once

#include <cstdint>

#include "instruction.h"

namespace amx_emulator {

// The general registers, rsp among them, in the order of their encoding and as the instruction finds them.
constexpr int kRegisters = 16;

// `address` is where the instruction lies. It reads and writes memory as the instruction does, and counts the
// instruction. Where the processor would raise #UD or #GP, a line on stderr says so and the process aborts.
// It allocates nothing and takes no lock.
void execute(const Instruction& instruction, uint64_t address, const uint64_t (&registers)[kRegisters]);

[[noreturn]] void die(const char* what, uint64_t address, const char* fault);

}  // namespace amx_emulator
