// The 128-byte swizzle of shared memory. Chunks of 16 bytes change places within 128 bytes, by the three bits
// of the address above these.
#pragma once

#include <cstddef>
#include <cstdint>

namespace selfattn::emulator {

constexpr int kSwizzledRowBytes = 128;
constexpr int kChunkBytes = 16;
// Where the pattern begins again. Shared memory ends at a page here, so that these bits of a host's address
// are those of an address in shared memory whose size is a multiple of this.
constexpr int kSwizzleAlignment = 1024;

template <class Byte>
Byte* swizzled(Byte* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return address + static_cast<std::ptrdiff_t>((bits ^ (bits >> 3 & 0x70)) - bits);
}

}  // namespace selfattn::emulator
