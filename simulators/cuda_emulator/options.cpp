#include "options.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace selfattn::emulator {

namespace {

uint64_t random_state = 0;

// Returns the index of the variable's value among `known`; 0 if it is not set.
template <size_t kCount>
int choice(const char* variable, const char* const (&known)[kCount]) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return 0;
  std::string names;
  for (size_t n = 0; n < kCount; ++n) {
    if (std::strcmp(value, known[n]) == 0) return static_cast<int>(n);
    names += std::string(n == 0 ? "" : ", ") + known[n];
  }
  throw std::runtime_error(std::string(variable) + " must be one of " + names + ", but it is \"" + value +
                           "\"");
}

long number(const char* variable, long otherwise) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return otherwise;
  char* end = nullptr;
  const long result = std::strtol(value, &end, 10);
  if (*end == '\0' && result >= 0) return result;
  throw std::runtime_error(std::string(variable) + " must be a number, but it is \"" + value + "\"");
}

Options read() {
  Options read;
  read.schedule =
      static_cast<Schedule>(choice("SELFATTN_EMULATOR_SCHEDULE", {"fifo", "lifo", "random", "sticky"}));
  read.copies = static_cast<Copies>(choice("SELFATTN_EMULATOR_COPIES", {"eager", "late", "random"}));
  read.seed = static_cast<uint64_t>(number("SELFATTN_EMULATOR_SEED", 0));
  read.capability = static_cast<int>(number("SELFATTN_EMULATOR_CAPABILITY", read.capability));
  read.banks = number("SELFATTN_EMULATOR_BANKS", 0) != 0;
  read.left_out = static_cast<int>(number("SELFATTN_EMULATOR_LEFT_OUT", 0));
  return read;
}

}  // namespace

const Options& options() {
  static const Options options = read();
  return options;
}

size_t shared_memory_limit(int capability) {
  // The numbers are from the CUDA C++ Programming Guide, technical specifications per compute capability.
  switch (capability) {
    case 75:
      return 64 * 1024;
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

uint32_t random_number() {
  // This is SplitMix64.
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

void restart_random_numbers() { random_state = options().seed; }

}  // namespace selfattn::emulator
