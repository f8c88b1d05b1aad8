// The signal handler by which instructions reach the emulator. A processor without AMX raises SIGILL at its
// instructions. The handler executes them, continues after them, and has them patched so that they do not
// trap again. It hands any other SIGILL on to the handler that was there before.
//
// The handler allocates nothing and takes no lock, so it runs in any number of threads. Its reads and writes
// for the program may fault like the instruction itself; that SIGSEGV is then reported from inside the
// handler.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>

#include "amx_emulator.h"
#include "execute.h"
#include "instruction.h"
#include "patch.h"

using namespace amx_emulator;

namespace {

using SigactionFunction = int (*)(int, const struct sigaction*, struct sigaction*);

// The handler of SIGILL that other code believes to be installed; see sigaction() below.
struct sigaction next_action{};
bool installed = false;

SigactionFunction real_sigaction() {
  static const auto function = reinterpret_cast<SigactionFunction>(dlsym(RTLD_NEXT, "sigaction"));
  return function;
}

void hand_on(int signal_number, siginfo_t* info, void* context, bool sent) {
  const struct sigaction next = next_action;
  if ((next.sa_flags & SA_SIGINFO) != 0) {
    next.sa_sigaction(signal_number, info, context);
    return;
  }
  if (next.sa_handler == SIG_IGN && sent) return;
  if (next.sa_handler != SIG_DFL && next.sa_handler != SIG_IGN) {
    next.sa_handler(signal_number);
    return;
  }
  // This is the default action: on return the instruction faults again, or the signal that was sent is there
  // again.
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  real_sigaction()(SIGILL, &standard, nullptr);
  if (sent) raise(SIGILL);
}

void on_illegal_instruction(int signal_number, siginfo_t* info, void* raw_context) {
  static constexpr int kPlace[kRegisters] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                             REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                             REG_R12, REG_R13, REG_R14, REG_R15};
  const bool sent = info->si_code <= 0;  // by kill() or raise(), not by an instruction
  auto& context = *static_cast<ucontext_t*>(raw_context);
  greg_t& rip = context.uc_mcontext.gregs[REG_RIP];
  const auto address = static_cast<uint64_t>(rip);
  Instruction instruction;
  const char* fault = nullptr;
  const Decoding decoding =
      sent ? Decoding::kNotAmx : decode(reinterpret_cast<const uint8_t*>(rip), instruction, fault);
  // Another thread may have patched the instruction since it trapped, even while it was being decoded. This
  // is asked last: bytes that are old now were old when they were read.
  if (!sent && is_patched(address)) return;
  if (decoding == Decoding::kNotAmx) {
    hand_on(signal_number, info, raw_context, sent);
    return;
  }
  if (decoding == Decoding::kUndefined) die("an AMX instruction", address, fault);
  uint64_t registers[kRegisters];
  for (int n = 0; n < kRegisters; ++n) {
    registers[n] = static_cast<uint64_t>(context.uc_mcontext.gregs[kPlace[n]]);
  }
  execute(instruction, address, registers);
  patch(address, instruction);
  rip += instruction.length;
}

__attribute__((constructor)) void install() {
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  // SA_ONSTACK: the handler runs on the thread's alternative stack if it has one, like every other handler of
  // faults.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  installed = real_sigaction()(SIGILL, &action, &next_action) == 0;
  if (!installed) std::perror("amx_emulator: no handler of SIGILL");
}

}  // namespace

extern "C" {

bool selfattn_emulates_amx() { return installed; }

// These two take the place of libc's. Python's faulthandler, which pytest switches on, installs itself for
// SIGILL; it gets the signals that the emulator hands on, and believes that it gets all of them.
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
