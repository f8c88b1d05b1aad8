#include "device_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace selfattn::emulator {

namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kGuardBytes = 8 * kAlignment;  // a row of 1,024 floats
constexpr unsigned char kGuard = 0xa5;          // no kernel writes this value, and it is not NaN

// A block is [kGuardBytes: the size of the memory, then a guard][the memory][kGuardBytes of a guard].
unsigned char* block_of(void* memory) { return static_cast<unsigned char*>(memory) - kGuardBytes; }

// Visits both guards of a block.
template <class Visit>
void for_guards(unsigned char* block, size_t bytes, const Visit& visit) {
  visit(block + sizeof(size_t), kGuardBytes - sizeof(size_t), "before");
  visit(block + kGuardBytes + bytes, kGuardBytes, "behind");
}

}  // namespace

void* allocate_device_memory(size_t bytes) {
  const size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* block = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, padded + 2 * kGuardBytes));
  if (block == nullptr) throw std::bad_alloc();
  std::memcpy(block, &bytes, sizeof(bytes));
  std::memset(block + kGuardBytes, 0xff, bytes);
  for_guards(block, bytes, [](unsigned char* guard, size_t count, const char*) {
    std::memset(guard, kGuard, count);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(guard, count);
#endif
  });
  return block + kGuardBytes;
}

void free_device_memory(void* memory) {
  if (memory == nullptr) return;
  unsigned char* const block = block_of(memory);
  size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof(bytes));
  for_guards(block, bytes, [bytes](unsigned char* guard, size_t count, const char* side) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(guard, count);
#endif
    const auto changed = [](unsigned char byte) { return byte != kGuard; };
    if (std::none_of(guard, guard + count, changed)) return;
    std::fprintf(stderr, "cuda emulator: something has written %s %zu bytes of device memory\n", side, bytes);
    std::abort();
  });
  std::free(block);
}

}  // namespace selfattn::emulator
