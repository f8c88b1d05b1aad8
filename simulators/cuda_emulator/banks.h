// Bank conflicts of shared memory, counted for the primitives that access it 16 bytes per lane. The memory
// serves 128 bytes at a time, one 4-byte word from each of 32 banks; 8 lanes make one such wavefront unless
// two of them need different words of a bank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "site.h"

namespace selfattn::emulator::banks {

// Returns how many wavefronts it takes to get 16 bytes from each of these addresses, of which there are at
// most 8.
int wavefronts(const std::vector<const void*>& addresses);

// Counts an access that at most 8 lanes have made together.
void record(const Site& site, const std::vector<const void*>& addresses);

// Counts a copy of 16 bytes by the running thread. Lanes issue their copies one by one, so the n-th copies of
// the lanes of a warp count as one instruction; end_block() gathers those that are incomplete.
void record_copy(const Site& site, const void* destination);
void end_block();

// Returns a line per place, "load_matrix_x4 at forward.cuh:12: 96 accesses, 96 wavefronts", and forgets all
// counts.
std::string take_report();

}  // namespace selfattn::emulator::banks
