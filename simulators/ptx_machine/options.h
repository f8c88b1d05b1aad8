// How the machine runs: read once from environment variables, which README.md describes.
#pragma once

#include <string>

#include "types.h"

namespace ptx_machine {

struct Options {
  int capability = 90;      // compute capability, major * 10 + minor
  u64 schedule = 0;         // the seed of the order of warps and blocks; 0: ascending
  bool late_copies = true;  // asynchronous copies happen at the wait for them, not at once
  bool races = false;       // looks for accesses that nothing orders
  bool banks = false;       // counts wavefronts of shared memory
  bool profile = false;     // counts instructions
  bool summary = false;     // says at the end how much was launched
  bool execute = true;      // false: kernels are launched and not run
  bool abort = false;       // ends the process at the first report
  int verbose = 0;          // 1 names each launch, 2 what is asked of the driver, too
  int approximation = 0;    // approximate functions are off by up to so many units in the last place
  double gigabytes = 8;     // of device memory
  std::string log;          // a file that reports are appended to
  std::string counts;       // a file that a line for each launch is appended to
};

// Ends the process with a sentence when a variable holds what it cannot hold.
const Options& options();

// The dynamic shared memory that a block may have on a device of this capability, if it asks for it.
u32 shared_memory_limit(int capability);
// What it may have without asking.
constexpr u32 kSharedWithoutAsking = 48 * 1024;

}  // namespace ptx_machine
