// Element types of tensors, and the one-element conversions that every device agrees on.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SELFATTN_HOST_DEVICE __host__ __device__
#else
#define SELFATTN_HOST_DEVICE
#endif

namespace selfattn {

enum class DType : int8_t { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

SELFATTN_HOST_DEVICE constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

inline SELFATTN_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline SELFATTN_HOST_DEVICE uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline SELFATTN_HOST_DEVICE float float_from_bfloat16(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest even. NaN keeps its sign and becomes quiet: rounding its payload could carry it into
// infinity.
inline SELFATTN_HOST_DEVICE uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline SELFATTN_HOST_DEVICE float float_from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Inf, NaN
    return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x03ffu) << 13));
  }
  if (magnitude >= 0x0400u) {  // normal: move the exponent bias from 15 to 127
    return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
  }
  // Subnormal: magnitude · 2^-24, exact in float32.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return float_from_bits(bits_from_float(value) | sign);
}

// Rounds to nearest even; overflow becomes infinity as in IEEE 754.
inline SELFATTN_HOST_DEVICE uint16_t float16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
  }
  if (magnitude >= 0x477ff000u) {  // at or above 65520, the midpoint beyond the largest finite value
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal. Adding 0.5 puts the float32 rounding position at 2^-24, so the
    // hardware rounds exactly where float16 must.
    const uint32_t rounded = bits_from_float(float_from_bits(magnitude) + 0.5f) - bits_from_float(0.5f);
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

// A finite double beyond the range of float stays finite: in a float64 mask only -inf hides a key.
template <class T>
inline SELFATTN_HOST_DEVICE T from_double(double value) {
  return static_cast<T>(value);
}
template <>
inline SELFATTN_HOST_DEVICE float from_double<float>(double value) {
  constexpr double kInfinity = __builtin_huge_val();
  constexpr double kLargest = 3.4028234663852886e38;
  if (value > kLargest && value < kInfinity) return static_cast<float>(kLargest);
  if (value < -kLargest && value > -kInfinity) return static_cast<float>(-kLargest);
  return static_cast<float>(value);
}

// Reads one element of any dtype as T (float or double). A boolean reads as 1 or 0.
template <class T>
inline SELFATTN_HOST_DEVICE T load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat64:
      return from_double<T>(static_cast<const double*>(data)[index]);
    case DType::kFloat32:
      return static_cast<T>(static_cast<const float*>(data)[index]);
    case DType::kBFloat16:
      return static_cast<T>(float_from_bfloat16(static_cast<const uint16_t*>(data)[index]));
    case DType::kFloat16:
      return static_cast<T>(float_from_float16(static_cast<const uint16_t*>(data)[index]));
    case DType::kBool:
      return static_cast<T>(static_cast<const uint8_t*>(data)[index] != 0);
  }
  return T(0);
}

template <class T>
inline SELFATTN_HOST_DEVICE void store_element(void* data, DType dtype, int64_t index, T value) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[index] = static_cast<double>(value);
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = bfloat16_from_float(static_cast<float>(value));
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = float16_from_float(static_cast<float>(value));
      break;
    case DType::kBool:
      static_cast<uint8_t*>(data)[index] = value != T(0);
      break;
  }
}

}  // namespace selfattn
