// Converts float16 and bfloat16 from and to float32, to nearest even if no name says otherwise. There are no
// branches, so that loops over lanes become vector instructions.
#pragma once

#include "types.h"

namespace ptx_machine {

inline float float_from_bfloat16(u16 bits) { return bits_as<float>(static_cast<u32>(bits) << 16); }

inline u16 bfloat16_from_float(float value) {
  const u32 bits = bits_as<u32>(value);
  const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<u16>(value != value ? 0x7fff : rounded);
}

inline u16 bfloat16_toward_zero(float value) {
  return static_cast<u16>(value != value ? 0x7fff : bits_as<u32>(value) >> 16);
}

inline float float_from_float16(u16 half) {
  const u32 sign = static_cast<u32>(half & 0x8000) << 16, rest = static_cast<u32>(half & 0x7fff) << 13;
  // A product moves the exponents, which makes subnormal numbers normal; infinity and NaN need all ones.
  const float moved = bits_as<float>(rest) * 0x1p112f;
  const u32 bits = rest >= 0x7c00u << 13 ? rest | 0x7f800000u : bits_as<u32>(moved);
  return bits_as<float>(sign | bits);
}

inline u16 float16_from_float(float value) {
  const u32 bits = bits_as<u32>(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  // From 2^-14 on, 10 bits are kept, and the exponent has another bias. 2^16 - 16 and more round to infinity.
  const u32 normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  // Below 2^-14, the sum with 1/2 has its last bit at 2^-24, and rounds.
  const u32 subnormal = bits_as<u32>(bits_as<float>(size) + 0.5f) - bits_as<u32>(0.5f);
  const u32 finite = size < 0x38800000u ? subnormal : normal;
  const u32 magnitude = size >= 0x477ff000u ? 0x7c00u : finite;
  return static_cast<u16>(value != value ? 0x7fff : sign | magnitude);
}

}  // namespace ptx_machine
