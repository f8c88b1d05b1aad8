// The memory that a kernel may touch. Device memory is host memory, so that a pointer means the same to both.
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
// Shared memory starts at this address of its own space. On sm_90 the system keeps the first KB, too, so a
// null pointer is no address in shared memory.
constexpr u32 kSharedBase = 1024;

enum class MemoryKind { kDevice, kPinned, kRegistered };

// Returns an allocation of its own, full of NaN, between margins that nothing may touch; null when the device
// has no memory left. `release` returns false for memory that was not allocated, and says on stderr if the
// margins were written.
void* allocate(u64 bytes, MemoryKind kind);
bool release(void* pointer);
// Adds memory of the host that kernels may touch as well.
void register_memory(u64 begin, u64 bytes);
void unregister_memory(u64 begin);

struct Range {
  u64 begin = 1, end = 0;
};
// Finds the allocation that holds `address`; returns false if there is none.
bool find_memory(u64 address, Range* range, MemoryKind* kind = nullptr);
// Describes what is near an address that lies in no allocation.
std::string describe_memory(u64 address);
// Grows whenever memory is freed: until then a Range that was found remains valid.
extern u32 memory_version;

struct MemoryUse {
  u64 total, now, most;
};
MemoryUse memory_use();

}  // namespace ptx_machine
