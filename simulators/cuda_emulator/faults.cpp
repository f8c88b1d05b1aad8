#include "faults.h"

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator {

namespace {

constexpr size_t kHandlerStackBytes = size_t{1} << 16;

struct sigaction earlier_segv;
struct sigaction earlier_bus;
stack_t earlier_stack;

std::string text_of(const void* address) {
  const SharedMemory& memory = shared_memory();
  if (memory.is_near(address)) {
    return "the byte " + std::to_string(static_cast<const unsigned char*>(address) - memory.data()) + " of " +
           std::to_string(memory.bytes()) + " bytes of shared memory";
  }
  char text[32];
  std::snprintf(text, sizeof(text), "the address %p", address);
  return text;
}

// The fault happened in a kernel, at an instruction that nothing resumes, so any code may run here. fail()
// leaves the handler by a jump, which is why SA_NODEFER keeps the signal unblocked.
void handle(int number, siginfo_t* info, void*) {
  if (!in_kernel()) {  // a fault of the host's code: the default action is right
    sigaction(number, number == SIGSEGV ? &earlier_segv : &earlier_bus, nullptr);
    return;
  }
  fail(whereabouts() + " accesses " + text_of(info->si_addr) + ", where there is no memory");
}

}  // namespace

FaultHandler::FaultHandler() {
#if !defined(__SANITIZE_ADDRESS__)  // AddressSanitizer reports faults itself, with the place
  // The handler needs a stack of its own, because the fault may be an overflow of a fiber's stack.
  static std::vector<char> memory(kHandlerStackBytes);
  stack_t stack{};
  stack.ss_sp = memory.data();
  stack.ss_size = memory.size();
  sigaltstack(&stack, &earlier_stack);
  struct sigaction action{};
  action.sa_sigaction = &handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &earlier_segv);
  sigaction(SIGBUS, &action, &earlier_bus);
#endif
}

FaultHandler::~FaultHandler() {
#if !defined(__SANITIZE_ADDRESS__)
  sigaction(SIGSEGV, &earlier_segv, nullptr);
  sigaction(SIGBUS, &earlier_bus, nullptr);
  sigaltstack(&earlier_stack, nullptr);
#endif
}

}  // namespace selfattn::emulator
