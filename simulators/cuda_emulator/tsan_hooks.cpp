// The functions of libtsan that kernels built with -fsanitize=thread call. libtsan itself is not linked.
#if defined(SELFATTN_EMULATOR_RACES)

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "races.h"
#include "scheduler.h"

// The names are otherwise reserved, but the sanitizer's interface is fixed.
// NOLINTBEGIN(bugprone-reserved-identifier)
namespace {

// Host code beside the kernels is instrumented, too; it runs on no thread of a kernel.
void read(const void* address, int bytes, const void* place) {
  if (selfattn::emulator::in_kernel()) selfattn::emulator::races::read(address, bytes, place);
}
void write(const void* address, int bytes, const void* place) {
  if (selfattn::emulator::in_kernel()) selfattn::emulator::races::write(address, bytes, place);
}

}  // namespace

#define SELFATTN_HOOKS(bytes)                                                                             \
  void __tsan_read##bytes(void* address) { read(address, bytes, __builtin_return_address(0)); }           \
  void __tsan_write##bytes(void* address) { write(address, bytes, __builtin_return_address(0)); }         \
  void __tsan_unaligned_read##bytes(void* address) { read(address, bytes, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* address) { write(address, bytes, __builtin_return_address(0)); }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

SELFATTN_HOOKS(1)
SELFATTN_HOOKS(2)
SELFATTN_HOOKS(4)
SELFATTN_HOOKS(8)
SELFATTN_HOOKS(16)

void __tsan_read_range(void* address, size_t bytes) {
  read(address, static_cast<int>(bytes), __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  write(address, static_cast<int>(bytes), __builtin_return_address(0));
}

// These serve the guards of static variables in host code.
uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)

#endif
