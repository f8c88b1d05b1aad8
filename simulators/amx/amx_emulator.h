// What a program sees of the emulator: whether it is there, and what it has executed. A program that must
// also run without it asks through dlsym, ctypes or a weak declaration.
#pragma once

#include <cstdint>

extern "C" {

// Returns true. csrc/cpu/amx_permission.cpp calls this, and takes AMX as present if the function exists.
bool selfattn_emulates_amx();

// How many instructions of this mnemonic ("tdpbf16ps", lower case) have run in this process, in all threads;
// "" stands for all kinds. Unknown mnemonics have never run.
uint64_t selfattn_amx_emulator_count(const char* mnemonic);

}  // extern "C"
