// What a program sees of the emulator: whether it is there, and how much it has executed. A program that must
// also run without it asks through dlsym, ctypes or a weak declaration.
#pragma once

#include <cstdint>

extern "C" {

// True. csrc/cpu/amx_permission.cpp asks this, and takes AMX as present where it exists.
bool selfattn_emulates_amx();

// How many instructions of this mnemonic ("tdpbf16ps", lower case) have run in this process, in all threads;
// of all kinds for "". Unknown mnemonics have run never.
uint64_t selfattn_amx_emulator_count(const char* mnemonic);

}  // extern "C"
