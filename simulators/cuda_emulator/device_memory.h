// Memory that kernels are given: nothing says what it holds, so NaN, and it ends where it was said to end.
#pragma once

#include <cstddef>

namespace selfattn::emulator {

// Aligned as the framework's allocator does. Guards lie on both sides, which nothing may touch:
// AddressSanitizer reports whoever does, at the place; without it a guard that has been written to ends the
// process when the memory is given back.
void* allocate_device_memory(size_t bytes);
void free_device_memory(void* memory);

}  // namespace selfattn::emulator
