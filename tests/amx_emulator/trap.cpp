// Where the processor meets the emulator: a processor without AMX raises SIGILL at its instructions, and the
// handler here executes them and goes on behind them. Anything else goes to whoever handled SIGILL before.
//
// The handler allocates nothing and takes no lock, so it runs in any number of threads. What it reads and
// writes for the program may fault like the instruction itself; that SIGSEGV is then reported from inside the
// handler.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx_emulator.h"
#include "instruction.h"
#include "tiles.h"

using namespace amx_emulator;

namespace {

// initial-exec: the dynamic model may allocate at a thread's first access, which would be in the handler.
// Preloaded and linked libraries get their thread storage with the thread.
__attribute__((tls_model("initial-exec"))) thread_local TileState state;

std::atomic<uint64_t> counts[kKinds];

using SigactionFunction = int (*)(int, const struct sigaction*, struct sigaction*);

// What other code believes to be SIGILL's handler; see sigaction() below.
struct sigaction next_action{};
bool installed = false;

SigactionFunction real_sigaction() {
  static const auto function = reinterpret_cast<SigactionFunction>(dlsym(RTLD_NEXT, "sigaction"));
  return function;
}

// A line for stderr, put together without stdio, which is not for signal handlers.
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

[[noreturn]] void die(const char* what, uint64_t address, const char* fault) {
  Line().text("amx_emulator: ").text(what).text(" at ").hexadecimal(address).text(": ").text(fault).print();
  std::abort();
}

uint64_t register_value(const ucontext_t& context, int number) {
  static constexpr int kPlace[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(context.uc_mcontext.gregs[kPlace[number]]);
}

const char* execute(const Instruction& instruction, const ucontext_t& context) {
  const MemoryOperand& memory = instruction.memory;
  const uint64_t rip = static_cast<uint64_t>(context.uc_mcontext.gregs[REG_RIP]);
  uint64_t address = static_cast<uint64_t>(static_cast<int64_t>(memory.displacement));
  if (memory.base == kNextInstruction) {
    address += rip + static_cast<uint64_t>(instruction.length);
  } else if (memory.base != kNoRegister) {
    address += register_value(context, memory.base);
  }
  const uint64_t scaled =
      memory.index == kNoRegister ? 0 : register_value(context, memory.index) << memory.shift;
  // Tile loads and stores take the index for the distance of rows, the others add it to the address.
  auto* const rows = reinterpret_cast<uint8_t*>(address);
  auto* const block = reinterpret_cast<uint8_t*>(address + scaled);
  const auto stride = static_cast<ptrdiff_t>(scaled);

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

void hand_on(int signal_number, siginfo_t* info, void* context) {
  const struct sigaction next = next_action;
  if ((next.sa_flags & SA_SIGINFO) != 0) {
    next.sa_sigaction(signal_number, info, context);
    return;
  }
  const bool sent = info->si_code <= 0;  // by kill() or raise(), not by an instruction
  if (next.sa_handler == SIG_IGN && sent) return;
  if (next.sa_handler != SIG_DFL && next.sa_handler != SIG_IGN) {
    next.sa_handler(signal_number);
    return;
  }
  // The default action: on return the instruction faults again, or the signal that was sent is there again.
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  real_sigaction()(SIGILL, &standard, nullptr);
  if (sent) raise(SIGILL);
}

void on_illegal_instruction(int signal_number, siginfo_t* info, void* raw_context) {
  auto& context = *static_cast<ucontext_t*>(raw_context);
  greg_t& rip = context.uc_mcontext.gregs[REG_RIP];
  Instruction instruction;
  const char* fault = nullptr;
  const Decoding decoding = info->si_code <= 0
                                ? Decoding::kNotAmx
                                : decode(reinterpret_cast<const uint8_t*>(rip), instruction, fault);
  if (decoding == Decoding::kNotAmx) {
    hand_on(signal_number, info, raw_context);
    return;
  }
  const auto address = static_cast<uint64_t>(rip);
  if (decoding == Decoding::kUndefined) die("an AMX instruction", address, fault);
  fault = execute(instruction, context);
  if (fault != nullptr) die(mnemonic(instruction.kind), address, fault);
  counts[static_cast<int>(instruction.kind)].fetch_add(1, std::memory_order_relaxed);
  rip += instruction.length;
}

__attribute__((constructor)) void install() {
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  // SA_ONSTACK: on the thread's alternative stack if it has one, as for every other handler of faults.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  installed = real_sigaction()(SIGILL, &action, &next_action) == 0;
  if (!installed) Line().text("amx_emulator: the handler of SIGILL cannot be installed").print();
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

extern "C" {

bool selfattn_emulates_amx() { return installed; }

uint64_t selfattn_amx_emulator_count(const char* name) {
  uint64_t sum = 0;
  for (int n = 0; n < kKinds; ++n) {
    if (*name == '\0' || std::strcmp(name, mnemonic(static_cast<Kind>(n))) == 0) sum += counts[n].load();
  }
  return sum;
}

// These two stand before libc's. Python's faulthandler, which pytest switches on, takes SIGILL for itself; it
// gets what is left of the signal, and believes to have all of it.
int sigaction(int signal_number, const struct sigaction* action, struct sigaction* before) noexcept {
  if (signal_number != SIGILL || !installed) return real_sigaction()(signal_number, action, before);
  const struct sigaction last = next_action;
  if (action != nullptr) next_action = *action;
  if (before != nullptr) *before = last;
  return 0;
}

sighandler_t signal(int signal_number, sighandler_t handler) noexcept {
  struct sigaction action{}, before{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(signal_number, &action, &before) == 0 ? before.sa_handler : SIG_ERR;
}

}  // extern "C"
