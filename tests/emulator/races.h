// The race detector: which accesses of which threads are ordered by nothing. It is there in the "race" build
// only, whose kernels report every load and store (-fsanitize=thread, hooks in tsan_hooks.cpp).
//
// Threads, and apart from them the engine that carries out a thread's asynchronous copies, have vector
// clocks: how much of every other one has happened before. __syncthreads and __syncwarp order what came
// before them before what comes after; waiting for copies orders the copies before what the waiting thread
// does next. Shuffles, votes, ldmatrix and mma order nothing: CUDA promises no more. Blocks are never
// ordered, so that two of them may not touch the same global bytes if one of them writes.
#pragma once

#include <cstdint>
#include <vector>

#include "site.h"

namespace selfattn::emulator::races {

#if defined(SELFATTN_EMULATOR_RACES)

void start_grid();
void start_block(int threads);

// All that these threads have done comes before all that they do from here on.
void synchronise(const std::vector<int>& threads);

// The running thread accesses memory, in a primitive or at a place of the program.
void read(const void* address, int bytes, const Site& site);
void read(const void* address, int bytes, const void* program_counter);
void write(const void* address, int bytes, const void* program_counter);

// The running thread's engine begins a copy (`source` null: writes zeros). Returns its number, for
// copies_arrived.
int64_t begin_copy(const void* destination, const void* source, int bytes, const Site& site);
// The running thread has waited for its copies up to this one.
void copies_arrived(int64_t last);

#else

inline void start_grid() {}
inline void start_block(int) {}
inline void synchronise(const std::vector<int>&) {}
inline void read(const void*, int, const Site&) {}
inline int64_t begin_copy(const void*, const void*, int, const Site&) { return 0; }
inline void copies_arrived(int64_t) {}

#endif

}  // namespace selfattn::emulator::races
