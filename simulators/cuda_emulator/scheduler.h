// The threads of one block, and which of them runs. One thread runs at a time, until it waits or ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copies.h"
#include "fiber.h"
#include "site.h"
#include "vector_types.h"
#include "warp.h"

namespace selfattn::emulator {

struct Thread {
  Fiber fiber;
  uint3 index{};
  int number = 0;  // within the block
  int warp = 0;
  int lane = 0;
  bool ended = false;
  Site waits_in;  // its primitive is null while the thread does not wait
  AsyncCopies copies;
};

struct Block {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  Barrier barrier;
};

// Return the running block and thread. They are valid only during a launch.
Block& block();
Thread& self();

// Returns whether a thread of a kernel is running, rather than the host's code or the emulator's own.
bool in_kernel();

// Lets the running thread wait until another wakes it; meanwhile others run. If none can run, the launch
// fails with a report of what each thread waits for.
void wait(const Site& site);
void wake(Thread& thread);

// Ends the launch: launch() throws this text. Only a thread of a kernel may call it.
[[noreturn]] void fail(const std::string& what);

// Returns where the running thread is: "thread 5 (warp 0, lane 5) of block (0, 0, 0)".
std::string whereabouts();

// Runs body(context) once in each thread of each block, with a new shared memory for each block.
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void* context), void* context);

}  // namespace selfattn::emulator
