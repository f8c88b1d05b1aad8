// Memory that kernels are given. It is filled with NaN, because its contents are undefined, and lies between
// guards.
#pragma once

#include <cstddef>

namespace selfattn::emulator {

// The memory is aligned as the framework's allocator aligns it, and nothing may touch the guards on its two
// sides. AddressSanitizer reports an access to a guard where it happens; without AddressSanitizer, a write to
// a guard ends the process when the memory is given back.
void* allocate_device_memory(size_t bytes);
void free_device_memory(void* memory);

}  // namespace selfattn::emulator
