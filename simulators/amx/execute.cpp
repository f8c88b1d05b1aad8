#include "execute.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx_emulator.h"
#include "tiles.h"

namespace amx_emulator {

namespace {

// The model is initial-exec, since the dynamic one may allocate at a thread's first access, which would be in
// a signal handler. Preloaded and linked libraries get their thread storage with the thread.
__attribute__((tls_model("initial-exec"))) thread_local TileState state;

std::atomic<uint64_t> counts[kKinds];

// A line for stderr, put together without stdio, which signal handlers must not use.
class Line {
 public:
  Line& text(const char* part) {
    while (*part != '\0' && length_ < kCapacity - 1) bytes_[length_++] = *part++;
    return *this;
  }
  Line& hexadecimal(uint64_t value) {
    char digits[19] = "0x0000000000000000";
    for (int n = 17; n >= 2; --n, value >>= 4) digits[n] = "0123456789abcdef"[value & 15];
    return text(digits);
  }
  void print() {
    bytes_[length_++] = '\n';
    if (write(STDERR_FILENO, bytes_, length_) < 0) return;  // there is nowhere else to complain
  }

 private:
  static constexpr size_t kCapacity = 256;
  char bytes_[kCapacity];
  size_t length_ = 0;
};

const char* perform(const Instruction& instruction, uint64_t address, uint64_t index) {
  // Tile loads and stores take the index as the distance of rows; the others add it to the address.
  auto* const rows = reinterpret_cast<uint8_t*>(address);
  auto* const block = reinterpret_cast<uint8_t*>(address + index);
  const auto stride = static_cast<ptrdiff_t>(index);
  switch (instruction.kind) {
    case Kind::kLoadConfig:
      return load_config(state, block);
    case Kind::kStoreConfig:
      store_config(state, block);
      return nullptr;
    case Kind::kRelease:
      release(state);
      return nullptr;
    case Kind::kZero:
      return zero(state, instruction.tile);
    case Kind::kLoad:
    case Kind::kLoadT1:
      return load(state, instruction.tile, rows, stride);
    case Kind::kStore:
      return store(state, instruction.tile, rows, stride);
    case Kind::kDotBf16:
      return dot_bf16(state, instruction.tile, instruction.source1, instruction.source2);
  }
  return nullptr;
}

__attribute__((destructor)) void report() {
  if (std::getenv("SELFATTN_AMX_EMULATOR_REPORT") == nullptr) return;
  std::fprintf(stderr, "amx_emulator:");
  for (int n = 0; n < kKinds; ++n) {
    const char* name = mnemonic(static_cast<Kind>(n));
    std::fprintf(stderr, " %s %llu", name,
                 static_cast<unsigned long long>(selfattn_amx_emulator_count(name)));
  }
  std::fprintf(stderr, "\n");
}

}  // namespace

void die(const char* what, uint64_t address, const char* fault) {
  Line().text("amx_emulator: ").text(what).text(" at ").hexadecimal(address).text(": ").text(fault).print();
  std::abort();
}

void execute(const Instruction& instruction, uint64_t address, const uint64_t (&registers)[kRegisters]) {
  const MemoryOperand& memory = instruction.memory;
  uint64_t operand = static_cast<uint64_t>(static_cast<int64_t>(memory.displacement));
  if (memory.base == kNextInstruction) {
    operand += address + static_cast<uint64_t>(instruction.length);
  } else if (memory.base != kNoRegister) {
    operand += registers[memory.base];
  }
  const uint64_t index = memory.index == kNoRegister ? 0 : registers[memory.index] << memory.shift;
  const char* const fault = perform(instruction, operand, index);
  if (fault != nullptr) die(mnemonic(instruction.kind), address, fault);
  counts[static_cast<int>(instruction.kind)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace amx_emulator

extern "C" uint64_t selfattn_amx_emulator_count(const char* name) {
  using namespace amx_emulator;
  uint64_t sum = 0;
  for (int n = 0; n < kKinds; ++n) {
    if (*name == '\0' || std::strcmp(name, mnemonic(static_cast<Kind>(n))) == 0) sum += counts[n].load();
  }
  return sum;
}
