#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>

#include "options.h"

namespace ptx_machine {

u32 memory_version = 1;

namespace {

constexpr u64 kMargin = 512;
constexpr u8 kUnwritten = 0xff;  // NaN in every floating-point type
constexpr u8 kFreed = 0xfe;      // also NaN
// Memory larger than this is not filled, because writing it would take seconds.
constexpr u64 kMostToFill = 1u << 30;
constexpr size_t kRemembered = 1000;  // how many freed allocations are kept for reports

struct Allocation {
  u64 bytes;
  MemoryKind kind;
  u8* block;  // what is to be freed; null for memory of the host
};

struct Memory {
  std::map<u64, Allocation> allocations;
  std::deque<Range> gone;
  MemoryUse use{static_cast<u64>(options().gigabytes * 1e9), 0, 0};
};

// It is never destroyed, because the process frees memory until its very end.
Memory& memory() {
  static auto* const memory = new Memory;
  return *memory;
}

u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }

void check_margins(const u8* begin, u64 bytes) {
  for (u64 n = 0; n < kMargin; ++n) {
    const bool before = begin[-1 - static_cast<s64>(n)] != kUnwritten,
               behind = begin[bytes + n] != kUnwritten;
    if (!before && !behind) continue;
    std::fprintf(stderr, "ptx machine: the host has written %s the %llu bytes at %p\n",
                 before ? "before" : "behind", static_cast<unsigned long long>(bytes),
                 static_cast<const void*>(begin));
    return;
  }
}

}  // namespace

void* allocate(u64 bytes, MemoryKind kind) {
  MemoryUse& use = memory().use;
  if (use.now + bytes > use.total) return nullptr;
  const u64 padded = (bytes + kMargin - 1) / kMargin * kMargin + 2 * kMargin;
  auto* block = static_cast<u8*>(std::aligned_alloc(kMargin, padded));
  if (block == nullptr) return nullptr;
  u8* const begin = block + kMargin;
  std::memset(block, kUnwritten, padded > kMostToFill ? kMargin : padded);
  std::memset(begin + bytes, kUnwritten, padded - kMargin - bytes);
  memory().allocations[address_of(begin)] = {bytes, kind, block};
  use.now += bytes;
  use.most = std::max(use.most, use.now);
  return begin;
}

bool release(void* pointer) {
  auto& allocations = memory().allocations;
  const auto found = allocations.find(address_of(pointer));
  if (found == allocations.end() || found->second.block == nullptr) return false;
  const Allocation allocation = found->second;
  check_margins(static_cast<u8*>(pointer), allocation.bytes);
  allocations.erase(found);
  ++memory_version;
  memory().use.now -= allocation.bytes;
  memory().gone.push_back({address_of(pointer), address_of(pointer) + allocation.bytes});
  if (memory().gone.size() > kRemembered) memory().gone.pop_front();
  if (allocation.bytes <= kMostToFill) std::memset(pointer, kFreed, allocation.bytes);
  std::free(allocation.block);
  return true;
}

void register_memory(u64 begin, u64 bytes) {
  memory().allocations[begin] = {bytes, MemoryKind::kRegistered, nullptr};
}

void unregister_memory(u64 begin) {
  memory().allocations.erase(begin);
  ++memory_version;
}

bool find_memory(u64 address, Range* range, MemoryKind* kind) {
  auto& allocations = memory().allocations;
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return false;
  --found;
  if (address >= found->first + found->second.bytes) return false;
  *range = {found->first, found->first + found->second.bytes};
  if (kind != nullptr) *kind = found->second.kind;
  return true;
}

std::string describe_memory(u64 address) {
  char text[160];
  std::string result;
  auto& allocations = memory().allocations;
  const auto after = allocations.upper_bound(address);
  if (after != allocations.begin()) {
    const auto before = std::prev(after);
    std::snprintf(text, sizeof text, ", %llu bytes after the beginning of %llu bytes at 0x%llx",
                  static_cast<unsigned long long>(address - before->first),
                  static_cast<unsigned long long>(before->second.bytes),
                  static_cast<unsigned long long>(before->first));
    result = text;
  }
  const auto& gone = memory().gone;
  const auto freed = std::find_if(gone.rbegin(), gone.rend(), [address](const Range& range) {
    return address >= range.begin && address < range.end;
  });
  if (freed != gone.rend()) {
    result += ", in memory of " + std::to_string(freed->end - freed->begin) + " bytes that has been freed";
  }
  return result;
}

MemoryUse memory_use() { return memory().use; }

}  // namespace ptx_machine
