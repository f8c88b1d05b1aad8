// Executes shifts, and instructions that look at single bits and bytes.
#include <algorithm>
#include <type_traits>

#include "instructions/choosers.h"
#include "instructions/lanes.h"

namespace ptx_machine {

namespace {

template <class T>
constexpr u32 kBits = 8 * sizeof(T);

template <class T>
struct ShiftLeft {
  static T f(T a, u32 by) { return by >= kBits<T> ? T(0) : static_cast<T>(a << by); }
};
template <class T>
struct ShiftRight {
  static T f(T a, u32 by) {
    return by < kBits<T> ? static_cast<T>(a >> by) : static_cast<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
  }
};
template <bool kLeft, bool kWrap>
struct FunnelShift {
  static u32 f(u32 low, u32 high, u32 by) {
    const u32 n = kWrap ? by & 31 : std::min(by, 32u);
    const u64 both = static_cast<u64>(high) << 32 | low;
    return static_cast<u32>(kLeft ? (both << n) >> 32 : both >> n);
  }
};

struct CountOnes {
  static u32 f(u32 a) { return static_cast<u32>(__builtin_popcount(a)); }
  static u32 f(u64 a) { return static_cast<u32>(__builtin_popcountll(a)); }
};
struct CountLeadingZeros {
  static u32 f(u32 a) { return a != 0 ? static_cast<u32>(__builtin_clz(a)) : 32; }
  static u32 f(u64 a) { return a != 0 ? static_cast<u32>(__builtin_clzll(a)) : 64; }
};
struct Reverse {
  static u32 f(u32 a) {
    u32 reversed = 0;
    for (int n = 0; n < 32; ++n) reversed |= (a >> n & 1) << (31 - n);
    return reversed;
  }
};
// Finds the highest bit that is not a copy of the sign.
struct FindHighest {
  template <class T>
  static u32 f(T a) {
    using Unsigned = std::make_unsigned_t<T>;
    const u64 bits = static_cast<Unsigned>(std::is_signed_v<T> && a < 0 ? static_cast<T>(~a) : a);
    return bits != 0 ? static_cast<u32>(63 - __builtin_clzll(bits)) : ~0u;
  }
};
struct PermuteBytes {
  static u32 f(u32 a, u32 b, u32 selectors) {
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 result = 0;
    for (int n = 0; n < 4; ++n) {
      const u32 selector = selectors >> (4 * n) & 0xf;
      u32 byte = static_cast<u32>(bytes >> (8 * (selector & 7))) & 0xff;
      if (selector & 8) byte = byte & 0x80 ? 0xff : 0;  // copies of the sign
      result |= byte << (8 * n);
    }
    return result;
  }
};

template <class T>
void extract_field(Warp& warp, const Instruction& ins, u32 mask) {
  T* d = warp.target<T>(ins, 0);
  const T* a = warp.source<T>(ins, 1);
  const u32 *positions = warp.source<u32>(ins, 2), *lengths = warp.source<u32>(ins, 3);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    const u32 position = positions[l] & 0xff, length = lengths[l] & 0xff;
    const u64 bits = static_cast<u64>(a[l]);
    const u32 last = std::min(position + length - 1, kBits<T> - 1);
    const bool sign = std::is_signed_v<T> && length > 0 && (bits >> last & 1) != 0;
    u64 field = 0;
    for (u32 n = 0; n < kBits<T>; ++n) {
      const bool inside = n < length && position + n < kBits<T>;
      field |= static_cast<u64>(inside ? (bits >> (position + n) & 1) != 0 : sign) << n;
    }
    d[l] = static_cast<T>(field);
  }
}

template <class T>
void insert_field(Warp& warp, const Instruction& ins, u32 mask) {
  T* d = warp.target<T>(ins, 0);
  const T *a = warp.source<T>(ins, 1), *b = warp.source<T>(ins, 2);
  const u32 *positions = warp.source<u32>(ins, 3), *lengths = warp.source<u32>(ins, 4);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    const u32 position = positions[l] & 0xff, length = lengths[l] & 0xff;
    const bool inside = position < kBits<T>;
    const u64 ones = length >= 64 ? ~0ull : (1ull << length) - 1;
    const u64 field = inside ? ones << position : 0;
    const u64 moved = inside ? static_cast<u64>(a[l]) << position : 0;
    d[l] = static_cast<T>((static_cast<u64>(b[l]) & ~field) | (moved & field));
  }
}

// Computes any function of three bits: bit n of the immediate is the function's value for the bits of n.
void logic_of_three(Warp& warp, const Instruction& ins, u32 mask) {
  u32* d = warp.target<u32>(ins, 0);
  const u32 *a = warp.source<u32>(ins, 1), *b = warp.source<u32>(ins, 2), *c = warp.source<u32>(ins, 3);
  const auto table = static_cast<u32>(ins.immediate);
  for (int l = 0; l < kLanes; ++l) {
    u32 result = 0;
    for (u32 n = 0; n < 8; ++n) {
      const u32 ones = (n & 4 ? a[l] : ~a[l]) & (n & 2 ? b[l] : ~b[l]) & (n & 1 ? c[l] : ~c[l]);
      result |= table >> n & 1 ? ones : 0;
    }
    d[l] = on(mask, l) ? result : d[l];
  }
}

template <class F>
Handler of_bits(int bits) {
  return bits == 32 ? &unary<u32, u32, F> : &unary<u32, u64, F>;
}

bool fields(Statement& statement) {
  const std::string& type = statement.type();
  const int bits = statement.bits();
  const bool extracts = statement.name() == "bfe";
  statement.target(bits);
  statement.sources(1, extracts ? 2 : 3, bits);
  statement.sources(extracts ? 2 : 3, extracts ? 4 : 5, 32);
  Handler& handler = statement.instruction.handler;
  if (!extracts) {
    handler = bits == 32 ? &insert_field<u32> : &insert_field<u64>;
  } else if (type[0] == 's') {
    handler = bits == 32 ? &extract_field<s32> : &extract_field<s64>;
  } else {
    handler = bits == 32 ? &extract_field<u32> : &extract_field<u64>;
  }
  return true;
}

Handler funnel_shift(bool left, bool wrap) {
  if (left) return wrap ? kTernary<u32, FunnelShift<true, true>> : kTernary<u32, FunnelShift<true, false>>;
  return wrap ? kTernary<u32, FunnelShift<false, true>> : kTernary<u32, FunnelShift<false, false>>;
}

Handler find_highest(const std::string& type) {
  if (type == "u32") return &unary<u32, u32, FindHighest>;
  if (type == "s32") return &unary<u32, s32, FindHighest>;
  return type == "u64" ? &unary<u32, u64, FindHighest> : &unary<u32, s64, FindHighest>;
}

template <template <class> class F, class T>
constexpr Handler kShift = &binary<T, T, u32, F<T>>;

}  // namespace

bool choose_shift(Statement& statement) {
  const int bits = statement.bits();
  statement.target(bits);
  statement.source(1, bits);
  statement.source(2, 32);
  Handler& handler = statement.instruction.handler;
  if (statement.name() == "shl") {
    handler = bits == 16   ? kShift<ShiftLeft, u16>
              : bits == 32 ? kShift<ShiftLeft, u32>
                           : kShift<ShiftLeft, u64>;
  } else if (statement.type()[0] == 's') {
    handler = bits == 16   ? kShift<ShiftRight, s16>
              : bits == 32 ? kShift<ShiftRight, s32>
                           : kShift<ShiftRight, s64>;
  } else {
    handler = bits == 16   ? kShift<ShiftRight, u16>
              : bits == 32 ? kShift<ShiftRight, u32>
                           : kShift<ShiftRight, u64>;
  }
  return true;
}

bool choose_bits(Statement& statement) {
  const std::string& name = statement.name();
  const int bits = statement.bits();
  if (name == "bfe" || name == "bfi") return fields(statement);
  Handler& handler = statement.instruction.handler;
  if (name == "popc" || name == "clz" || name == "bfind") {
    statement.target(32);
    statement.source(1, bits);
    handler = name == "popc"  ? of_bits<CountOnes>(bits)
              : name == "clz" ? of_bits<CountLeadingZeros>(bits)
                              : find_highest(statement.type());
    return !statement.has("shiftamt");
  }
  if (bits != 32) return false;
  statement.target(32);
  if (name == "brev") {
    statement.source(1, 32);
    handler = kUnary<u32, Reverse>;
    return true;
  }
  statement.sources(1, 4, 32);
  if (name == "shf") {
    handler = funnel_shift(statement.has("l"), statement.has("wrap"));
    return true;
  }
  if (name == "lop3") statement.instruction.immediate = static_cast<s64>(statement.operands.at(4).value);
  handler = name == "lop3" ? &logic_of_three : kTernary<u32, PermuteBytes>;
  return statement.words.size() == 2;
}

}  // namespace ptx_machine
