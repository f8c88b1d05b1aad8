// A stack for each CUDA thread, and the switch from one to another.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace selfattn::emulator {

class Fiber {
 public:
  // The fiber of the caller's stack.
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next switch to this fiber call entry(), which must never return. Allocates a stack once, with a
  // page below it that nothing may touch.
  void prepare(void (*entry)());

  // Returns whether the address lies in this fiber's stack.
  bool holds(const void* address) const { return address >= stack_ && address < stack_ + kStackBytes; }

  // Leaves the running fiber, which is `from`, and continues `to`.
  static void switch_to(Fiber& from, Fiber& to);
  // An entry calls this first.
  static void entered();

 private:
  static constexpr size_t kStackBytes = size_t{1} << 18;

  char* stack_ = nullptr;
#if defined(__x86_64__)
  void* top_ = nullptr;  // where the saved registers are
#else
  ucontext_t context_;
#endif
  void* sanitizer_stack_ = nullptr;  // AddressSanitizer's handle of a stack that is not running
};

}  // namespace selfattn::emulator
