// Barriers of asynchronous copies (mbarrier), by their address in shared memory. What they do is said in
// csrc/cuda/common/ptx_sm90.cuh.
#pragma once

#include <cstdint>
#include <string>

#include "races.h"
#include "site.h"

namespace selfattn::emulator::barriers {

void start_block();
// All threads have ended: reports copies that nobody has waited for.
void end_block();

void init(void* barrier, int arrivals, const Site& site);
void init_fence();
void arrive(void* barrier, const Site& site);
void arrive_expecting(void* barrier, int bytes, const Site& site);
void wait(void* barrier, uint32_t parity, const Site& site);

// A copy to this barrier begins; fails where none may. Returns the barrier's number, in the order of their
// initialisation.
int begin_copy(void* barrier, const Site& site);
// The copy has brought its bytes.
void finish_copy(void* barrier, int bytes, const races::Box& box);

// It has begun and not completed.
void copy_is_on_its_way(void* barrier);
// Whether its phase lacks nothing but bytes.
bool lacks_bytes(void* barrier);

// One line for each barrier that threads wait for: what it lacks.
std::string what_barriers_lack();

}  // namespace selfattn::emulator::barriers
