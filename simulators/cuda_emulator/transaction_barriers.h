// Barriers of asynchronous copies (mbarrier), by their address in shared memory.
// csrc/cuda/common/ptx_sm90.cuh says what they do.
#pragma once

#include <cstdint>
#include <string>

#include "races.h"
#include "site.h"

namespace selfattn::emulator::barriers {

void start_block();
// Is called when all threads have ended. Reports copies that no thread has waited for.
void end_block();

void init(void* barrier, int arrivals, const Site& site);
void init_fence();
void arrive(void* barrier, const Site& site);
void arrive_expecting(void* barrier, int bytes, const Site& site);
void wait(void* barrier, uint32_t parity, const Site& site);

// Begins a copy to this barrier; fails if none may begin. Returns the barrier's number, in the order of
// initialisation.
int begin_copy(void* barrier, const Site& site);
// Is called when the copy has brought its bytes.
void finish_copy(void* barrier, int bytes, const races::Box& box);

// Is called when a copy has begun and has not completed.
void copy_is_on_its_way(void* barrier);
// Returns whether the barrier's phase lacks nothing but bytes.
bool lacks_bytes(void* barrier);

// Returns a line for each barrier that threads wait for, which says what it lacks.
std::string what_barriers_lack();

}  // namespace selfattn::emulator::barriers
