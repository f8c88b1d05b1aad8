#include "shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "scheduler.h"

namespace selfattn::emulator {

namespace {

constexpr unsigned char kPoison = 0xff;
// This is more than any kernel may have, so that one reservation serves all.
constexpr size_t kMostBytes = size_t{1} << 18;
// A stray index near the memory faults instead of finding something else.
constexpr size_t kGuardBytes = size_t{1} << 20;

}  // namespace

SharedMemory::~SharedMemory() {
  if (pages_ != nullptr) munmap(pages_, kMostBytes + 2 * kGuardBytes);
}

void SharedMemory::start(size_t bytes) {
  if (pages_ == nullptr) {
    void* memory = mmap(nullptr, kMostBytes + 2 * kGuardBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    pages_ = static_cast<unsigned char*>(memory);
  }
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t needed = (bytes + page - 1) / page * page;
  unsigned char* const end = pages_ + kGuardBytes + kMostBytes;
  if (needed != page_bytes_) {
    mprotect(end - kMostBytes, kMostBytes, PROT_NONE);
    mprotect(end - needed, needed, PROT_READ | PROT_WRITE);
    page_bytes_ = needed;
  }
  std::memset(end - needed, kPoison, needed);
  bytes_ = bytes;
  data_ = end - (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void SharedMemory::check_margin() const {
  const unsigned char* end = pages_ + kGuardBytes + kMostBytes;
  for (const unsigned char* byte = end - page_bytes_; byte < end; ++byte) {
    if (*byte != kPoison && !(byte >= data_ && byte < data_ + bytes_)) {
      throw std::runtime_error("cuda emulator: block (" + std::to_string(blockIdx.x) + ", " +
                               std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) +
                               ") has written outside its " + std::to_string(bytes_) +
                               " bytes of shared memory, at byte " + std::to_string(byte - data_));
    }
  }
}

bool SharedMemory::holds(const void* address, size_t bytes) const {
  const auto* byte = static_cast<const unsigned char*>(address);
  return byte >= data_ && byte + bytes <= data_ + bytes_;
}

bool SharedMemory::is_near(const void* address) const {
  const auto* byte = static_cast<const unsigned char*>(address);
  return pages_ != nullptr && byte >= pages_ && byte < pages_ + kMostBytes + 2 * kGuardBytes;
}

SharedMemory& shared_memory() {
  static SharedMemory memory;
  return memory;
}

void check_shared(const void* address, int bytes, const Site& site) {
  check_shared(address, bytes, bytes, site);
}

void check_shared(const void* address, int bytes, int alignment, const Site& site) {
  const SharedMemory& memory = shared_memory();
  if (!memory.holds(address, static_cast<size_t>(bytes))) {
    fail(whereabouts() + " gives " + to_string(site) + " the byte " +
         std::to_string(static_cast<const unsigned char*>(address) - memory.data()) + " of " +
         std::to_string(memory.bytes()) + " bytes of shared memory, and " + std::to_string(bytes) +
         " from there on");
  }
  if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) != 0) {
    fail(whereabouts() + " gives " + to_string(site) + " an address that is not aligned to " +
         std::to_string(alignment) + " bytes");
  }
}

}  // namespace selfattn::emulator
