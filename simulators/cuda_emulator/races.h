// The race detector: it finds accesses of different threads that nothing orders. It exists only in the "race"
// build, whose kernels report every load and store (-fsanitize=thread, hooks in tsan_hooks.cpp).
//
// Each thread has a vector clock, and so has the engine that carries out its asynchronous copies. The clock
// says how much of what every other one did has happened before. __syncthreads and __syncwarp order what came
// before them before what comes after; waiting for copies orders the copies before what the waiting thread
// does next. Shuffles, votes, ldmatrix and mma order nothing: CUDA promises no more. Blocks are never
// ordered, so two of them may not touch the same global bytes if one of them writes.
#pragma once

#include <cstdint>
#include <vector>

#include "site.h"

namespace selfattn::emulator::races {

// What an agent makes known to others: how much of each agent's work has happened before.
struct Order {
#if defined(SELFATTN_EMULATOR_RACES)
  std::vector<uint32_t> clock;
#endif
};

// A copy of a box: the number of the barrier that counts it, and the copy's number among those.
struct Box {
  int barrier = 0;
  uint32_t number = 0;
};

#if defined(SELFATTN_EMULATOR_RACES)

void start_grid();
void start_block(int threads);

// All that these threads have done comes before all that they do from here on.
void synchronise(const std::vector<int>& threads);

// The running thread accesses memory, in a primitive or at a place of the program.
void read(const void* address, int bytes, const Site& site);
void read(const void* address, int bytes, const void* program_counter);
void write(const void* address, int bytes, const Site& site);
void write(const void* address, int bytes, const void* program_counter);
// Records an atomic operation on memory. Atomic operations do not race with each other, and order nothing.
void update(const void* address, int bytes, const Site& site);

// The running thread's engine begins a copy; without a `source` it writes zeros. Returns the copy's number,
// for copies_arrived.
int64_t begin_copy(const void* destination, const void* source, int bytes, const Site& site);
// The running thread has waited for its copies up to this one.
void copies_arrived(int64_t last);

// All that this thread has done comes before what threads do after they acquire the order.
void release(Order& order, int thread);
void acquire(const Order& order, int thread);

// The running thread's stores to shared memory come before what the asynchronous proxy does for threads that
// this thread is ordered before.
void fence_async_proxy();
// The running thread begins to copy a box, which the barrier of this number counts. The copy reads and writes
// through the asynchronous proxy.
Box begin_box(int barrier);
void read_box(const void* address, int bytes, const Box& box, const Site& site);
void write_box(const void* address, int bytes, const Box& box, const Site& site);
// The box, and earlier boxes that its barrier counts, come before what threads do after they acquire the
// order.
void release_box(Order& order, const Box& box);

// `order` gathers what all threads know that call this with it; the first of them begins it.
void meet(Order& order, bool first);
// A warpgroup's product, which begins with that knowledge, reads an operand through the asynchronous proxy.
void read_product(const void* address, int bytes, const Order& knowledge, int group, int64_t product,
                  const Site& site);
// The running thread has waited for the products of its warpgroup up to this one.
void products_finished(int group, int64_t last);

#else

inline void start_grid() {}
inline void start_block(int) {}
inline void synchronise(const std::vector<int>&) {}
inline void read(const void*, int, const Site&) {}
inline void write(const void*, int, const Site&) {}
inline void update(const void*, int, const Site&) {}
inline int64_t begin_copy(const void*, const void*, int, const Site&) { return 0; }
inline void copies_arrived(int64_t) {}
inline void release(Order&, int) {}
inline void acquire(const Order&, int) {}
inline void fence_async_proxy() {}
inline Box begin_box(int) { return {}; }
inline void read_box(const void*, int, const Box&, const Site&) {}
inline void write_box(const void*, int, const Box&, const Site&) {}
inline void release_box(Order&, const Box&) {}
inline void meet(Order&, bool) {}
inline void read_product(const void*, int, const Order&, int, int64_t, const Site&) {}
inline void products_finished(int, int64_t) {}

#endif

}  // namespace selfattn::emulator::races
