// Executes arithmetic of integers.
#include <type_traits>

#include "instructions/choosers.h"
#include "instructions/lanes.h"

namespace ptx_machine {

namespace {

template <class T>
struct Add {
  static T f(T a, T b) { return static_cast<T>(a + b); }
};
template <class T>
struct Subtract {
  static T f(T a, T b) { return static_cast<T>(a - b); }
};
template <class T>
struct Minimum {
  static T f(T a, T b) { return a < b ? a : b; }
};
template <class T>
struct Maximum {
  static T f(T a, T b) { return a < b ? b : a; }
};
// A division by zero has no defined result; in PTX the smallest number divided by -1 wraps around.
template <class T>
struct Divide {
  static T f(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(T(0) - a);
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Remainder {
  static T f(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
template <class T>
struct MultiplyLow {
  static T f(T a, T b) { return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b)); }
};
template <class T>
struct MultiplyHigh {
  static T f(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
  }
};
template <class Wide, class T>
struct MultiplyWide {
  static Wide f(T a, T b) { return static_cast<Wide>(static_cast<Wide>(a) * static_cast<Wide>(b)); }
};
template <class T>
struct MultiplyAddLow {
  static T f(T a, T b, T c) {
    return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b) + static_cast<u64>(c));
  }
};
template <class Wide, class T>
struct MultiplyAddWide {
  static Wide f(T a, T b, Wide c) {
    return static_cast<Wide>(static_cast<u64>(MultiplyWide<Wide, T>::f(a, b)) + static_cast<u64>(c));
  }
};

Handler multiply(const Statement& statement) {
  const std::string& type = statement.type();
  if (statement.has("lo")) return binary_of_bits<MultiplyLow>(statement.bits());
  if (statement.has("hi")) return binary_of_type<MultiplyHigh>(type, statement.bits());
  if (!statement.has("wide")) return nullptr;
  if (type == "u16") return &binary<u32, u16, u16, MultiplyWide<u32, u16>>;
  if (type == "s16") return &binary<s32, s16, s16, MultiplyWide<s32, s16>>;
  if (type == "u32") return &binary<u64, u32, u32, MultiplyWide<u64, u32>>;
  return type == "s32" ? &binary<s64, s32, s32, MultiplyWide<s64, s32>> : nullptr;
}

Handler multiply_add(const Statement& statement) {
  const std::string& type = statement.type();
  const int bits = statement.bits();
  if (statement.has("lo")) {
    return bits == 16   ? kTernary<u16, MultiplyAddLow<u16>>
           : bits == 32 ? kTernary<u32, MultiplyAddLow<u32>>
                        : kTernary<u64, MultiplyAddLow<u64>>;
  }
  if (!statement.has("wide")) return nullptr;
  if (type == "u16") return &ternary<u32, u16, u32, MultiplyAddWide<u32, u16>>;
  if (type == "s16") return &ternary<s32, s16, s32, MultiplyAddWide<s32, s16>>;
  if (type == "u32") return &ternary<u64, u32, u64, MultiplyAddWide<u64, u32>>;
  return type == "s32" ? &ternary<s64, s32, s64, MultiplyAddWide<s64, s32>> : nullptr;
}

}  // namespace

Handler integer_arithmetic(const Statement& statement) {
  const std::string &name = statement.name(), &type = statement.type();
  const int bits = statement.bits();
  if (statement.has("sat")) return nullptr;
  if (name == "add") return binary_of_bits<Add>(bits);
  if (name == "sub") return binary_of_bits<Subtract>(bits);
  if (name == "min") return binary_of_type<Minimum>(type, bits);
  if (name == "max") return binary_of_type<Maximum>(type, bits);
  if (name == "div") return binary_of_type<Divide>(type, bits);
  if (name == "rem") return binary_of_type<Remainder>(type, bits);
  if (name == "mul") return multiply(statement);
  return name == "mad" ? multiply_add(statement) : nullptr;
}

}  // namespace ptx_machine
