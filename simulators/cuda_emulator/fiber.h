// A stack of its own for each CUDA thread, and the switch from one to another.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace selfattn::emulator {

class Fiber {
 public:
  // The fiber of the caller's own stack.
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next switch to this fiber call entry(), which must never return. Allocates a stack once, with a
  // page below it that nothing may touch.
  void prepare(void (*entry)());

  // Whether the address lies in this fiber's stack.
  bool holds(const void* address) const { return address >= stack_ && address < stack_ + kStackBytes; }

  // Leaves the running fiber, which is `from`, and goes on with `to`.
  static void switch_to(Fiber& from, Fiber& to);
  // The first thing that an entry calls.
  static void entered();

 private:
  static constexpr size_t kStackBytes = size_t{1} << 18;

  char* stack_ = nullptr;
#if defined(__x86_64__)
  void* top_ = nullptr;  // of the saved registers
#else
  ucontext_t context_;
#endif
  void* sanitizer_stack_ = nullptr;  // what AddressSanitizer keeps of a stack that waits
};

}  // namespace selfattn::emulator
