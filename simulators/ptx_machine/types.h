// Numbers by the names that PTX has for their types, and the lanes of a warp.
#pragma once

#include <cstdint>
#include <cstring>

namespace ptx_machine {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

constexpr int kLanes = 32;
constexpr u32 kWholeWarp = 0xffffffffu;

// Returns whether a mask of lanes contains this one.
inline bool on(u32 mask, int lane) { return (mask >> lane & 1) != 0; }
inline int first_lane(u32 mask) { return __builtin_ctz(mask); }
inline int count_lanes(u32 mask) { return __builtin_popcount(mask); }

// Returns the number that has these bits; a smaller type's bits are the low bits of a larger type.
template <class To, class From>
To bits_as(From from) {
  To to{};
  std::memcpy(&to, &from, sizeof(to) < sizeof(from) ? sizeof(to) : sizeof(from));
  return to;
}

}  // namespace ptx_machine
