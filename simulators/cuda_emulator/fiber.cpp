#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the registers that calls preserve on the old stack, and loads those of the new stack.
asm(R"(
  .text
  .type selfattn_emulator_switch, @function
selfattn_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size selfattn_emulator_switch, .-selfattn_emulator_switch
)");
extern "C" void selfattn_emulator_switch(void** save, void* restore);
#endif

namespace selfattn::emulator {

namespace {

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

#if defined(__SANITIZE_ADDRESS__)
// The stack of the emulator's caller, as AddressSanitizer reports it at the first switch.
const void* caller_stack = nullptr;
size_t caller_stack_bytes = 0;
#endif

}  // namespace

Fiber::~Fiber() {
  if (stack_ == nullptr) return;
#if defined(__SANITIZE_ADDRESS__)
  // The next owner of this memory must not find the marks of frames that never returned.
  __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
  munmap(stack_ - page(), kStackBytes + page());
}

void Fiber::prepare(void (*entry)()) {
  if (stack_ == nullptr) {
    void* memory = mmap(nullptr, kStackBytes + page(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page(), PROT_NONE);
    stack_ = static_cast<char*>(memory) + page();
  }
#if defined(__x86_64__)
  // Six registers, the address that the switch returns to, and what would be entry's own return address.
  constexpr int kWords = 8;
  auto* words = reinterpret_cast<uintptr_t*>(stack_ + kStackBytes) - kWords;
  for (int n = 0; n < kWords; ++n) words[n] = 0;
  words[6] = reinterpret_cast<uintptr_t>(entry);
  top_ = words;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
  sanitizer_stack_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  // Threads that end leave frames behind that never return.
  __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack = to.stack_ != nullptr ? to.stack_ : caller_stack;
  const size_t bytes = to.stack_ != nullptr ? kStackBytes : caller_stack_bytes;
  __sanitizer_start_switch_fiber(&from.sanitizer_stack_, stack, bytes);
#endif
#if defined(__x86_64__)
  selfattn_emulator_switch(&from.top_, to.top_);
#else
  swapcontext(&from.context_, &to.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.sanitizer_stack_, nullptr, nullptr);
#endif
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (caller_stack == nullptr) {  // the first fiber of the process is entered from the caller
    caller_stack = stack;
    caller_stack_bytes = bytes;
  }
#endif
}

}  // namespace selfattn::emulator
