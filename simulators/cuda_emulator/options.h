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

// Throws std::runtime_error with a sentence when a variable holds what it cannot hold.
const Options& options();

// Whether a kernel is to do without this statement: mutate.py writes the question before each, in its copy of
// the kernels, and numbers them from 1.
inline bool leaves_out(int statement) { return options().left_out == statement; }

// The dynamic shared memory that a block may have on a device of this capability.
size_t shared_memory_limit(int capability);

// Numbers that follow from the seed only.
uint32_t random_number();
// Starts them again, so that a launch does not depend on those before it.
void restart_random_numbers();

}  // namespace selfattn::emulator
