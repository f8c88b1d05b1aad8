// How the emulator runs kernels: read once from environment variables, which README.md describes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace selfattn::emulator {

enum class Schedule { kFifo, kLifo, kRandom, kSticky };
enum class Copies { kEager, kLate, kRandom };

struct Options {
  Schedule schedule = Schedule::kFifo;
  Copies copies = Copies::kEager;
  uint64_t seed = 0;
  int capability = 80;
  bool banks = false;
  int left_out = 0;
};

// Throws std::runtime_error if a variable has a value that is not allowed.
const Options& options();

// Returns whether a kernel is to leave out this statement. mutate.py writes this question before each
// statement in its copy of the kernels, and numbers the statements from 1.
inline bool leaves_out(int statement) { return options().left_out == statement; }

// Returns how much dynamic shared memory a block may have on a device of this capability.
size_t shared_memory_limit(int capability);

// Returns numbers that depend on the seed only.
uint32_t random_number();
// Starts the numbers again, so that a launch does not depend on earlier launches.
void restart_random_numbers();

}  // namespace selfattn::emulator
