// Bank conflicts of shared memory. The memory serves 128 bytes at a time, one 4-byte word from each of 32
// banks: lanes that fill 128 bytes make one such wavefront, unless two of them need different words of a
// bank.
#pragma once

#include "decode/kernel.h"

namespace ptx_machine {

// Adds an access of `bytes` by each lane to the counts of the instruction.
void count_wavefronts(const Instruction& ins, u32 mask, u32 bytes, const u8* memory,
                      u8* const (&pointers)[kLanes]);

// Returns a line for each place that accesses shared memory: "file:12: 96 accesses, 128 wavefronts".
std::string banks_report(const Module& module);

}  // namespace ptx_machine
