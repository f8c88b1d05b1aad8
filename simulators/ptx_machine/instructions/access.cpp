#include "instructions/access.h"

#include <algorithm>
#include <cstdio>

#include "execute/banks.h"
#include "execute/counts.h"
#include "execute/races.h"
#include "options.h"

namespace ptx_machine {

namespace {

std::string hexadecimal(u64 value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

const char* word(Access access) { return access == Access::kRead ? "a read" : "a write"; }

struct Addresses {
  u64 of_lane[kLanes];
  u64 low, high;  // the lowest and highest address of the lanes in the mask
};

Addresses addresses_of(const Warp& warp, const Instruction& ins, u32 mask, const MemoryAccess& access) {
  Addresses addresses;
  auto& of_lane = addresses.of_lane;
  if (ins.operands[access.place] == kNoOperand) {
    for (int l = 0; l < kLanes; ++l) of_lane[l] = static_cast<u64>(access.added);
  } else if (access.wide) {
    const u64* registers = warp.source<u64>(ins, access.place);
    for (int l = 0; l < kLanes; ++l) of_lane[l] = registers[l] + static_cast<u64>(access.added);
  } else {
    const u32* registers = warp.source<u32>(ins, access.place);
    for (int l = 0; l < kLanes; ++l)
      of_lane[l] = static_cast<u32>(registers[l] + static_cast<u32>(access.added));
  }
  const u64 some = of_lane[first_lane(mask)];
  u64 low = some, high = some, all = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 address = on(mask, l) ? of_lane[l] : some;
    low = address < low ? address : low;
    high = address > high ? address : high;
    all |= address;
  }
  addresses.low = low;
  addresses.high = high;
  if (all & (access.bytes - 1)) {
    u32 bad = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (on(mask, l) && (of_lane[l] & (access.bytes - 1))) bad |= 1u << l;
    }
    fail(warp, ins, bad,
         std::string(word(access.access)) + " of " + std::to_string(access.bytes) + " bytes at " +
             hexadecimal(of_lane[first_lane(bad)]) + ", which is not aligned");
  }
  return addresses;
}

[[noreturn]] void fail_outside(const Warp& warp, const Instruction& ins, int lane, const MemoryAccess& access,
                               u64 address, const std::string& where) {
  fail(warp, ins, 1u << lane,
       std::string(word(access.access)) + " of " + std::to_string(access.bytes) + " bytes at " +
           hexadecimal(address) + " is outside of " + where);
}

struct Window {
  const char* name;
  u64 start;  // the first address
  u64 bytes;
  u8* memory;
  u64 per_lane;  // the distance between the memories of two lanes
};

Window window_of(const Warp& warp, Space space) {
  const Block& block = *warp.block;
  switch (space) {
    case Space::kShared:
      return {"shared", kSharedBase, block.shared_bytes, block.shared, 0};
    case Space::kLocal:
      return {"local", 0, block.kernel->local_bytes, warp.local, block.kernel->local_bytes};
    default:
      // Nothing writes parameters, because the decoder knows no such store.
      return {"parameter", 0, block.kernel->parameter_bytes, const_cast<u8*>(block.launch->parameters.data()),
              0};
  }
}

// Reports the lane whose address is outside of the memory.
[[noreturn]] void fail_in_window(const Warp& warp, const Instruction& ins, u32 mask,
                                 const MemoryAccess& access, const Window& window, u64 first,
                                 const Addresses& addresses) {
  for (int l = 0; l < kLanes; ++l) {
    const u64 address = addresses.of_lane[l];
    if (!on(mask, l) || (address >= first && address - first + access.bytes <= window.bytes)) continue;
    fail_outside(warp, ins, l, access, address,
                 "the " + std::to_string(window.bytes) + " bytes of " + window.name + " memory from " +
                     std::to_string(first));
  }
  fail_outside(warp, ins, first_lane(mask), access, addresses.low, "every memory");
}

void resolve_in_window(Warp& warp, const Instruction& ins, u32 mask, const MemoryAccess& access, Space space,
                       u64 base, const Addresses& addresses, u8* (&pointers)[kLanes]) {
  const Window window = window_of(warp, space);
  const u64 first = base + window.start;
  if (addresses.low < first || addresses.high - first + access.bytes > window.bytes) {
    fail_in_window(warp, ins, mask, access, window, first, addresses);
  }
  // The addresses of lanes that are not in the mask are ignored.
  const u64 memory = reinterpret_cast<u64>(window.memory) - first;
  for (int l = 0; l < kLanes; ++l) {
    const u64 pointer = memory + addresses.of_lane[l] + window.per_lane * static_cast<u64>(l);
    pointers[l] = reinterpret_cast<u8*>(pointer);
  }
  if (space != Space::kShared) return;
  if (warp.block->races != nullptr && !access.is_copy) {
    for (int l = 0; l < kLanes; ++l) {
      if (!on(mask, l)) continue;
      const auto offset = static_cast<u32>(pointers[l] - warp.block->shared);
      warp.block->races->shared(warp, ins, l, offset, access.bytes, access.access);
    }
  }
  if (!access.is_mbarrier && (options().banks || warp.block->counts != nullptr)) {
    count_wavefronts(ins, mask, access.bytes, warp.block->shared, pointers);
  }
}

void resolve_in_device_memory(Warp& warp, const Instruction& ins, u32 mask, const MemoryAccess& access,
                              const Addresses& addresses, u8* (&pointers)[kLanes]) {
  const bool known = ins.found_version == memory_version && addresses.low >= ins.found.begin &&
                     addresses.high + access.bytes <= ins.found.end;
  for (int l = 0; l < kLanes; ++l) pointers[l] = reinterpret_cast<u8*>(addresses.of_lane[l]);
  for (u32 rest = known ? 0 : mask; rest != 0; rest &= rest - 1) {
    Range range;
    const int l = first_lane(rest);
    const u64 address = addresses.of_lane[l];
    if (!find_memory(address, &range) || address + access.bytes > range.end) {
      fail_outside(warp, ins, l, access, address, "device memory" + describe_memory(address));
    }
    ins.found = range;
  }
  ins.found_version = memory_version;
  if (warp.block->counts != nullptr) warp.block->counts->device(mask, access, addresses.of_lane);
  if (warp.block->races == nullptr || access.is_copy) return;
  for (int l = 0; l < kLanes; ++l) {
    if (on(mask, l))
      warp.block->races->device(warp, ins, l, addresses.of_lane[l], access.bytes, access.access);
  }
}

}  // namespace

void resolve(Warp& warp, const Instruction& ins, u32 mask, const MemoryAccess& access,
             u8* (&pointers)[kLanes]) {
  const Addresses addresses = addresses_of(warp, ins, mask, access);
  if (access.space != Space::kGeneric && access.space != Space::kGlobal) {
    return resolve_in_window(warp, ins, mask, access, access.space, 0, addresses, pointers);
  }
  if (access.space == Space::kGlobal || addresses.high < kSharedWindow) {
    return resolve_in_device_memory(warp, ins, mask, access, addresses, pointers);
  }
  const u64 base = addresses.low & ~(kWindowBytes - 1);
  if (base == (addresses.high & ~(kWindowBytes - 1)) && base >= kSharedWindow && base <= kParameterWindow) {
    const Space space = base == kSharedWindow  ? Space::kShared
                        : base == kLocalWindow ? Space::kLocal
                                               : Space::kParameters;
    return resolve_in_window(warp, ins, mask, access, space, base, addresses, pointers);
  }
  if (count_lanes(mask) == 1) {
    fail_outside(warp, ins, first_lane(mask), access, addresses.low, "every memory");
  }
  for (int l = 0; l < kLanes; ++l) {  // the lanes' addresses are in different spaces
    u8* one[kLanes];
    if (!on(mask, l)) continue;
    resolve(warp, ins, 1u << l, access, one);
    pointers[l] = one[l];
  }
}

}  // namespace ptx_machine
