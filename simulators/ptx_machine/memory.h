// Which memory a kernel may touch. Device memory is host memory, so that a pointer means the same to both.
//
// Generic addresses of shared, local and parameter memory lie in windows that the host never maps.
#pragma once

#include <string>

#include "types.h"

namespace ptx_machine {

enum class Space : u8 { kGeneric, kGlobal, kShared, kLocal, kParameters };

constexpr u64 kSharedWindow = 0x7000000000000000ull;
constexpr u64 kLocalWindow = 0x7100000000000000ull;
constexpr u64 kParameterWindow = 0x7200000000000000ull;
constexpr u64 kWindowBytes = 1ull << 32;
// Shared memory starts at this address of its own space, as on sm_90, where the system keeps the first KB: a
// null pointer is no address in it.
constexpr u32 kSharedBase = 1024;

enum class MemoryKind { kDevice, kPinned, kRegistered };

// An allocation of its own between margins that nobody may touch, full of NaN; null when the device has no
// more. `release` is false for what was not allocated; it says so on stderr if the margins were written.
void* allocate(u64 bytes, MemoryKind kind);
bool release(void* pointer);
// Memory of the host that kernels may touch as well.
void register_memory(u64 begin, u64 bytes);
void unregister_memory(u64 begin);

struct Range {
  u64 begin = 1, end = 0;
};
// The allocation that holds `address`; false where there is none.
bool find_memory(u64 address, Range* range, MemoryKind* kind = nullptr);
// What is near an address that is in none.
std::string describe_memory(u64 address);
// Grows with everything that goes, so that what was found may be remembered until then.
extern u32 memory_version;

struct MemoryUse {
  u64 total, now, most;
};
MemoryUse memory_use();

}  // namespace ptx_machine
