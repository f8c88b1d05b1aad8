// How the machine runs: read once from environment variables, which README.md describes.
#pragma once

#include <string>

#include "types.h"

namespace ptx_machine {

struct Options {
  int capability = 90;      // compute capability, major * 10 + minor
  u64 schedule = 0;         // the seed of the order of warps and blocks; 0 is ascending order
  bool late_copies = true;  // whether asynchronous copies happen at the wait for them
  bool races = false;       // whether to look for accesses that nothing orders
  bool banks = false;       // whether to count wavefronts of shared memory
  bool profile = false;     // whether to count instructions
  bool summary = false;     // whether to print at the end how much was launched
  bool execute = true;      // whether launched kernels run
  bool abort = false;       // whether the first report ends the process
  int verbose = 0;          // 1 prints launches, 2 also what is asked of the driver
  int approximation = 0;    // by how many units in the last place approximate functions may be off
  u32 left_out = 0;         // what the kernels' %envreg0 holds: see mutate_kernels.py
  double gigabytes = 8;     // gigabytes of device memory
  std::string log;          // a file that reports are appended to
  std::string counts;       // a file that a line for each launch is appended to
};

// Ends the process with a message if a variable has a value that is not allowed.
const Options& options();

// Returns how much dynamic shared memory a block may have on a device of this capability, if it asks for it.
u32 shared_memory_limit(int capability);
// A block may have this much without asking.
constexpr u32 kSharedWithoutAsking = 48 * 1024;

}  // namespace ptx_machine
