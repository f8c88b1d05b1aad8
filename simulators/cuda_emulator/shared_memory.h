// The dynamic shared memory of the running block, next to pages that nothing may touch.
#pragma once

#include <cstddef>

#include "site.h"

namespace selfattn::emulator {

class SharedMemory {
 public:
  static constexpr size_t kAlignment = 128;

  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Prepares memory for the next block, filled with bytes 0xff: NaN in every floating-point type.
  void start(size_t bytes);
  // Fails if something has written the few bytes between the memory and the page after it.
  void check_margin() const;

  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool holds(const void* address, size_t bytes) const;
  // Returns whether the address lies in the pages of the memory or in those around them.
  bool is_near(const void* address) const;

 private:
  unsigned char* pages_ = nullptr;
  size_t page_bytes_ = 0;
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
};

SharedMemory& shared_memory();

// Fails unless all bytes of a primitive's access lie in shared memory, aligned to their number.
void check_shared(const void* address, int bytes, const Site& site);
// The same with another alignment.
void check_shared(const void* address, int bytes, int alignment, const Site& site);

}  // namespace selfattn::emulator
