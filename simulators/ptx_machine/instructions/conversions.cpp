// Executes cvt. `variant` is the mode of rounding: 'n', 'z', 'm', 'p', or 0 if none is needed.
#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "instructions/choosers.h"
#include "instructions/float_rounding.h"
#include "instructions/lanes.h"
#include "instructions/small_numbers.h"

namespace ptx_machine {

namespace {

constexpr s64 kSaturate = 1, kFlush = 2;  // bits of the immediate

// Numbers of 8 bits are in registers of 16 or 32 bits: a Register is the register's type, the other the
// number's.
template <class ResultRegister, class Result, class SourceRegister, class Source>
void between_integers(Warp& warp, const Instruction& ins, u32 mask) {
  auto* d = warp.target<ResultRegister>(ins, 0);
  const auto* a = warp.source<SourceRegister>(ins, 1);
  if (ins.immediate & kSaturate) {
    constexpr __int128 low = std::numeric_limits<Result>::min(), high = std::numeric_limits<Result>::max();
    for (int l = 0; l < kLanes; ++l) {
      const __int128 value = static_cast<Source>(a[l]);
      const __int128 clamped = value < low ? low : value > high ? high : value;
      if (on(mask, l)) d[l] = static_cast<ResultRegister>(static_cast<Result>(clamped));
    }
    return;
  }
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) {
    const auto value = static_cast<Result>(static_cast<Source>(a[l]));
    d[l] = on(mask, l) ? static_cast<ResultRegister>(value) : d[l];
  }
}

double round_to_integer(double value, char mode) {
  switch (mode) {
    case 'n':
      return std::nearbyint(value);
    case 'z':
      return std::trunc(value);
    case 'm':
      return std::floor(value);
    case 'p':
      return std::ceil(value);
    default:
      return value;
  }
}

// A number that is too large becomes the nearest integer; NaN becomes 0, or the sign bit in 64 bits.
template <class Register, class Result, class Source>
void integer_from_float(Warp& warp, const Instruction& ins, u32 mask) {
  auto* d = warp.target<Register>(ins, 0);
  const auto* a = warp.source<Source>(ins, 1);
  const double high = std::ldexp(1.0, static_cast<int>(8 * sizeof(Result)) - std::is_signed_v<Result>);
  const double low = std::is_signed_v<Result> ? -high : 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    const double value = round_to_integer(a[l], static_cast<char>(ins.variant));
    Result result;
    if (value != value) {
      result = static_cast<Result>(sizeof(Result) == 8 ? u64{1} << 63 : 0);
    } else if (value <= low) {
      result = std::numeric_limits<Result>::min();
    } else if (value >= high) {
      result = std::numeric_limits<Result>::max();
    } else {
      result = static_cast<Result>(value);
    }
    d[l] = static_cast<Register>(result);
  }
}

template <class Result, class Register, class Source>
void float_from_integer(Warp& warp, const Instruction& ins, u32 mask) {
  auto* d = warp.target<Result>(ins, 0);
  const auto* a = warp.source<Register>(ins, 1);
  if (ins.variant == 'n' || ins.variant == 0) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) {
      d[l] = on(mask, l) ? static_cast<Result>(static_cast<Source>(a[l])) : d[l];
    }
    return;
  }
  const int mode = ins.variant == 'z' ? FE_TOWARDZERO : ins.variant == 'm' ? FE_DOWNWARD : FE_UPWARD;
  std::fesetround(mode);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    // It is volatile, so that the conversion is not moved to where another mode of rounding holds.
    volatile Source source = static_cast<Source>(a[l]);
    volatile Result result = static_cast<Result>(source);
    d[l] = result;
  }
  std::fesetround(FE_TONEAREST);
}

void to_integral_float(Warp& warp, const Instruction& ins, u32 mask) {
  auto* d = warp.target<float>(ins, 0);
  const auto* a = warp.source<float>(ins, 1);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    float value = ins.immediate & kFlush ? flushed(a[l]) : a[l];
    if (ins.variant != 0) {
      value = static_cast<float>(round_to_integer(value, static_cast<char>(ins.variant)));
    }
    if (ins.immediate & kSaturate) value = value > 0 ? (value < 1 ? value : 1.0f) : 0.0f;
    d[l] = canonical(value);
  }
}
void to_integral_double(Warp& warp, const Instruction& ins, u32 mask) {
  auto* d = warp.target<double>(ins, 0);
  const auto* a = warp.source<double>(ins, 1);
  for (int l = 0; l < kLanes; ++l) {
    if (on(mask, l)) d[l] = round_to_integer(a[l], static_cast<char>(ins.variant));
  }
}
void float_from_double(Warp& warp, const Instruction& ins, u32 mask) {
  auto* d = warp.target<float>(ins, 0);
  const auto* a = warp.source<double>(ins, 1);
  for (int l = 0; l < kLanes; ++l) {
    if (on(mask, l)) d[l] = canonical(round_to_float(a[l], 0, static_cast<char>(ins.variant)));
  }
}
struct DoubleFromFloat {
  static double f(float a) { return a; }
};

template <float (*kConvert)(u16)>
struct FromSmall {
  static float f(u16 a) { return canonical(kConvert(a)); }
};
template <u16 (*kConvert)(float)>
struct ToSmall {
  static u16 f(float a) { return kConvert(a); }
  static u32 f(float high, float low) { return static_cast<u32>(kConvert(high)) << 16 | kConvert(low); }
};

// Converts from a type in a register of so many bits to Result in a ResultRegister.
template <class ResultRegister, class Result>
Handler from_integer_type(const std::string& from, int bits) {
  using R = ResultRegister;
  using T = Result;
  if (from == "u8") return bits == 16 ? &between_integers<R, T, u16, u8> : &between_integers<R, T, u32, u8>;
  if (from == "s8") return bits == 16 ? &between_integers<R, T, u16, s8> : &between_integers<R, T, u32, s8>;
  if (from == "u16")
    return bits == 16 ? &between_integers<R, T, u16, u16> : &between_integers<R, T, u32, u16>;
  if (from == "s16")
    return bits == 16 ? &between_integers<R, T, u16, s16> : &between_integers<R, T, u32, s16>;
  if (from == "u32")
    return bits == 32 ? &between_integers<R, T, u32, u32> : &between_integers<R, T, u64, u32>;
  if (from == "s32")
    return bits == 32 ? &between_integers<R, T, u32, s32> : &between_integers<R, T, u64, s32>;
  if (from == "u64") return &between_integers<R, T, u64, u64>;
  return from == "s64" ? &between_integers<R, T, u64, s64> : nullptr;
}

Handler integer_conversion(const std::string& to, int to_bits, const std::string& from, int from_bits) {
  const auto small = [&](Handler in_16, Handler in_32) { return to_bits == 16 ? in_16 : in_32; };
  if (to == "u8")
    return small(from_integer_type<u16, u8>(from, from_bits), from_integer_type<u32, u8>(from, from_bits));
  if (to == "s8")
    return small(from_integer_type<u16, s8>(from, from_bits), from_integer_type<u32, s8>(from, from_bits));
  if (to == "u16")
    return small(from_integer_type<u16, u16>(from, from_bits), from_integer_type<u32, u16>(from, from_bits));
  if (to == "s16")
    return small(from_integer_type<u16, s16>(from, from_bits), from_integer_type<u32, s16>(from, from_bits));
  const bool wide = to_bits == 64;
  if (to == "u32")
    return wide ? from_integer_type<u64, u32>(from, from_bits) : from_integer_type<u32, u32>(from, from_bits);
  if (to == "s32")
    return wide ? from_integer_type<u64, s32>(from, from_bits) : from_integer_type<u32, s32>(from, from_bits);
  if (to == "u64") return from_integer_type<u64, u64>(from, from_bits);
  return to == "s64" ? from_integer_type<u64, s64>(from, from_bits) : nullptr;
}

template <class Source>
Handler integer_type_from(const std::string& to, int bits) {
  if (to == "u8")
    return bits == 16 ? &integer_from_float<u16, u8, Source> : &integer_from_float<u32, u8, Source>;
  if (to == "s8")
    return bits == 16 ? &integer_from_float<u16, s8, Source> : &integer_from_float<u32, s8, Source>;
  if (to == "u16") return &integer_from_float<u16, u16, Source>;
  if (to == "s16") return &integer_from_float<u16, s16, Source>;
  if (to == "u32") return &integer_from_float<u32, u32, Source>;
  if (to == "s32") return &integer_from_float<u32, s32, Source>;
  if (to == "u64") return &integer_from_float<u64, u64, Source>;
  return to == "s64" ? &integer_from_float<u64, s64, Source> : nullptr;
}

template <class Result>
Handler float_from(const std::string& from, int bits) {
  if (from == "u8")
    return bits == 16 ? &float_from_integer<Result, u16, u8> : &float_from_integer<Result, u32, u8>;
  if (from == "s8")
    return bits == 16 ? &float_from_integer<Result, u16, s8> : &float_from_integer<Result, u32, s8>;
  if (from == "u16") return &float_from_integer<Result, u16, u16>;
  if (from == "s16") return &float_from_integer<Result, u16, s16>;
  if (from == "u32") return &float_from_integer<Result, u32, u32>;
  if (from == "s32") return &float_from_integer<Result, u32, s32>;
  if (from == "u64") return &float_from_integer<Result, u64, u64>;
  return from == "s64" ? &float_from_integer<Result, u64, s64> : nullptr;
}

Handler float_conversion(const Statement& statement, const std::string& to, const std::string& from) {
  const char mode = statement.rounding(0);
  const bool plain = !statement.has("sat") && !statement.has("relu");
  if (from == "f16" && to == "f32") return &unary<float, u16, FromSmall<float_from_float16>>;
  if (from == "bf16" && to == "f32") return &unary<float, u16, FromSmall<float_from_bfloat16>>;
  if (from == "f32" && mode == 'n' && plain) {
    if (to == "f16") return &unary<u16, float, ToSmall<float16_from_float>>;
    if (to == "bf16") return &unary<u16, float, ToSmall<bfloat16_from_float>>;
    if (to == "f16x2") return &binary<u32, float, float, ToSmall<float16_from_float>>;
    if (to == "bf16x2") return &binary<u32, float, float, ToSmall<bfloat16_from_float>>;
  }
  if (from == "f32" && mode == 'z' && plain) {
    if (to == "bf16") return &unary<u16, float, ToSmall<bfloat16_toward_zero>>;
    if (to == "bf16x2") return &binary<u32, float, float, ToSmall<bfloat16_toward_zero>>;
  }
  if (from == "f32" && to == "f32") return &to_integral_float;
  if (!plain) return nullptr;
  if (from == "f64" && to == "f64") return &to_integral_double;
  if (from == "f32" && to == "f64") return &unary<double, float, DoubleFromFloat>;
  return from == "f64" && to == "f32" ? &float_from_double : nullptr;
}

bool is_float(const std::string& type) { return type.find('f') != std::string::npos; }

}  // namespace

bool choose_conversion(Statement& statement) {
  Instruction& ins = statement.instruction;
  const std::string &from = statement.type(), &to = statement.words.at(statement.words.size() - 2);
  const Operand &result = statement.operands.at(0), &source = statement.operands.at(1);
  const bool is_number = source.kind == Operand::Kind::kImmediate;
  const int to_bits = result.bits, from_bits = is_number ? std::max(bits_of_type(from), 16) : source.bits;
  ins.operands[0] = result.at;
  ins.operands[1] = statement.builder.source(source, from_bits);
  if (statement.operands.size() > 2) statement.source(2, 32);
  ins.variant = static_cast<u8>(statement.rounding(0));
  ins.immediate = (statement.has("sat") ? kSaturate : 0) | (statement.has("ftz") ? kFlush : 0);
  if (is_float(from) && is_float(to)) {
    ins.handler = float_conversion(statement, to, from);
  } else if (!is_float(from) && !is_float(to)) {
    ins.handler = integer_conversion(to, to_bits, from, from_bits);
  } else if (ins.immediate != 0) {
    return false;
  } else if (is_float(from)) {
    ins.handler = from == "f32"   ? integer_type_from<float>(to, to_bits)
                  : from == "f64" ? integer_type_from<double>(to, to_bits)
                                  : nullptr;
  } else {
    ins.handler = to == "f32"   ? float_from<float>(from, from_bits)
                  : to == "f64" ? float_from<double>(from, from_bits)
                                : nullptr;
  }
  return ins.handler != nullptr;
}

}  // namespace ptx_machine
