// Operations of torch on single numbers, for functions of scores (score_function.h). They are those that C++
// lacks or defines differently. Compilers turn plain loops over them into vector instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace selfattn::score_function {

template <class To, class From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To result;
  std::memcpy(&result, &x, sizeof(result));
  return result;
}

inline float from_bfloat16(uint16_t x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }

// Rounds to the nearest, ties to even.
inline float round_to_bfloat16(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  return x != x ? x : bits_of<float>(rounded);
}

inline float from_float16(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float scaled = bits_of<float>(magnitude) * 0x1p112f;  // subnormals too
  const float special = bits_of<float>(magnitude | 0x7f800000u);
  const float result = (half & 0x7c00) == 0x7c00 ? special : scaled;
  return (half & 0x8000) != 0 ? -result : result;
}

// Adding a number whose last bit is the one to round to rounds the sum there.
inline float round_to_float16(float x) {
  const float size = std::fabs(x);
  const uint32_t exponent = bits_of<uint32_t>(size < 0x1p-14f ? 0x1p-14f : size) & 0x7f800000u;
  const float magic = bits_of<float>(exponent + (13u << 23)) * 1.5f;
  const float rounded = (size + magic) - magic;
  const float limited = size >= 65520.0f ? std::numeric_limits<float>::infinity() : rounded;
  return x != x ? x : std::copysign(size == std::numeric_limits<float>::infinity() ? size : limited, x);
}

// Returns a * b + c, rounded once if that is one instruction: compilers may not merge products and sums by
// themselves.
template <class T>
inline T multiply_add(T a, T b, T c) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) return fmaf(a, b, c);
  return fma(a, b, c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  if constexpr (sizeof(T) == sizeof(float)) return __builtin_fmaf(a, b, c);
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T>
inline T minimum_of(T a, T b) {
  return a < b || a != a ? a : b;
}
template <class T>
inline T maximum_of(T a, T b) {
  return a > b || a != a ? a : b;
}
template <class T>
inline T fmin_of(T a, T b) {
  return b < a || a != a ? b : a;
}
template <class T>
inline T fmax_of(T a, T b) {
  return b > a || a != a ? b : a;
}

// Integers that leave their dtype wrap around.
template <class T>
using Bits = std::conditional_t<sizeof(T) == sizeof(uint64_t), uint64_t, uint32_t>;
template <class T>
inline T add_of(T a, T b) {
  return static_cast<T>(static_cast<Bits<T>>(a) + static_cast<Bits<T>>(b));
}
template <class T>
inline T sub_of(T a, T b) {
  return static_cast<T>(static_cast<Bits<T>>(a) - static_cast<Bits<T>>(b));
}
template <class T>
inline T mul_of(T a, T b) {
  return static_cast<T>(static_cast<Bits<T>>(a) * static_cast<Bits<T>>(b));
}
// Shifts by negative numbers, or by all bits and more, leave 0, or the sign.
template <class T>
inline T bitwise_left_shift_of(T a, T by) {
  constexpr T kBits = 8 * sizeof(T);
  return by < 0 || by >= kBits ? T(0) : static_cast<T>(static_cast<Bits<T>>(a) << by);
}
template <class T>
inline T bitwise_right_shift_of(T a, T by) {
  constexpr T kMost = 8 * sizeof(T) - (std::is_signed_v<T> ? 1 : 0);
  return static_cast<T>(a >> (by < 0 || by >= kMost ? kMost : by));
}
template <class T>
inline T neg_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return -x;
  } else {
    return sub_of(T(0), x);
  }
}
// The least integer has no absolute value in its type, so callers must not pass it: see wrapped_abs_of.
template <class T>
inline T abs_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fabs(x);
  } else {
    return static_cast<T>(x < 0 ? -x : x);
  }
}
template <class T>
inline T wrapped_abs_of(T x) {
  return x < 0 ? neg_of(x) : x;
}
template <class T>
inline T sign_of(T x) {
  return static_cast<T>((x > T(0)) - (x < T(0)));
}
// For real numbers torch's sgn and sign are the same.
template <class T>
inline T sgn_of(T x) {
  return sign_of(x);
}
template <class T>
inline T relu_of(T x) {
  return x < T(0) ? T(0) : x;
}
template <class T>
inline T square_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return x * x;
  } else {
    return mul_of(x, x);
  }
}
template <class T>
inline bool is_infinite(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fabs(x) == std::numeric_limits<T>::infinity();
  } else {
    return false;
  }
}
// Tells whether the sign bit is set: -0 and NaN may have it, too.
template <class T>
inline bool is_negative(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::copysign(T(1), x) < T(0);
  } else {
    return x < 0;
  }
}

// Rounding leaves integers as they are.
template <class T>
inline T floor_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::floor(x);
  } else {
    return x;
  }
}
template <class T>
inline T ceil_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::ceil(x);
  } else {
    return x;
  }
}
template <class T>
inline T trunc_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::trunc(x);
  } else {
    return x;
  }
}
template <class T>
inline T round_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::nearbyint(x);
  } else {
    return x;
  }
}
template <class T>
inline T frac_of(T x) {
  return x - trunc_of(x);
}

// Divides integers; a division by 0 gives 0, where torch raises an error.
template <class T>
inline T truncate_divide(T a, T b) {
  if (b == T(0)) return T(0);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return neg_of(a);
  return static_cast<T>(a / b);
}
template <class T>
inline T fmod_of(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmod(a, b);
  } else {
    return sub_of(a, mul_of(truncate_divide(a, b), b));
  }
}
template <class T>
inline T remainder_of(T a, T b) {
  const T rest = fmod_of(a, b);
  return static_cast<T>(rest != T(0) && (rest < T(0)) != (b < T(0)) ? rest + b : rest);
}
template <class T>
inline T floor_divide_of(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (b == T(0)) return a / b;
    const T rest = std::fmod(a, b);
    const T quotient = (a - rest) / b - (rest != T(0) && (rest < T(0)) != (b < T(0)) ? T(1) : T(0));
    if (quotient == T(0)) return std::copysign(T(0), a / b);
    const T floor = std::floor(quotient);
    return quotient - floor > T(0.5) ? floor + T(1) : floor;
  } else {
    const T quotient = truncate_divide(a, b);
    const T rest = sub_of(a, mul_of(quotient, b));
    return static_cast<T>(quotient - (rest != T(0) && (rest < T(0)) != (b < T(0))));
  }
}

// Returns e^x to 1 unit in the last place: e^x = 2^n e^r with |r| below half of ln 2, and a polynomial for
// e^r (Cody and Waite 1980). 2^n comes in two factors, so that results below the smallest normal number are
// rounded.
inline float exp_of(float x) {
  const float limited = x > 89.0f ? 89.0f : (x < -104.0f ? -104.0f : x);
  const float shifted = multiply_add(limited, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: the last bits are n
  const float n = shifted - 12582912.0f;
  const int32_t exponent = bits_of<int32_t>(shifted) - 0x4b400000;
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, limited));
  float p = multiply_add(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  const float e = multiply_add(p * r, r, r) + 1.0f;
  const int32_t half = exponent >> 1;
  const float low = bits_of<float>(static_cast<uint32_t>(half + 127) << 23);
  const float high = bits_of<float>(static_cast<uint32_t>(exponent - half + 127) << 23);
  return e * low * high;
}
inline double exp_of(double x) { return std::exp(x); }

// Uses m = e^(-2|x|) - 1, which keeps the digits of small arguments: tanh(|x|) = -m / (m + 2). Errors are
// below 3 units in the last place. The polynomial is that of benchmarks/fit_exp.py.
inline float tanh_of(float x) {
  const float size = std::fabs(x);
  const float doubled = size > 20.0f ? -40.0f : -2.0f * size;
  const float shifted = multiply_add(doubled, 1.44269504f, 12582912.0f);  // as in exp_of
  const float n = shifted - 12582912.0f;
  const float power = bits_of<float>((bits_of<uint32_t>(shifted) - 0x4b400000u + 127u) << 23);
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, doubled));
  float p = multiply_add(1.393364999630925e-3f, r, 8.36915567e-3f);
  p = multiply_add(p, r, 4.16664649e-2f);
  p = multiply_add(p, r, 1.6666505195758111e-1f);
  p = multiply_add(p, r, 0.5f);
  const float m = multiply_add(power, multiply_add(p * r, r, r), power - 1.0f);
  return std::copysign(m / (m + 2.0f), x);
}
inline double tanh_of(double x) { return std::tanh(x); }

template <class T>
inline T sigmoid_of(T x) {
  return T(1) / (T(1) + exp_of(-x));
}
template <class T>
inline T tanh_backward_of(T grad, T result) {
  return grad * (T(1) - result * result);
}
template <class T>
inline T sigmoid_backward_of(T grad, T result) {
  return grad * (T(1) - result) * result;
}
template <class T>
inline T reciprocal_of(T x) {
  return T(1) / x;
}
template <class T>
inline T rsqrt_of(T x) {
  return T(1) / std::sqrt(x);
}
// Starts at the nearer end, as torch does, so that the result is exact at both.
template <class T>
inline T lerp_of(T a, T b, T weight) {
  return std::fabs(weight) < T(0.5) ? multiply_add(weight, b - a, a) : multiply_add(weight - T(1), b - a, b);
}
// A negative power of an integer is 0, except of 1 and -1.
template <class T>
inline T pow_of(T base, T exponent) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::pow(base, exponent);
  } else {
    if (exponent < 0 && base != T(1) && base != static_cast<T>(-1)) return T(0);
    T result = 1;
    for (T rest = wrapped_abs_of(exponent); rest > 0;
         rest = static_cast<T>(rest >> 1), base = mul_of(base, base)) {
      if (rest & 1) result = mul_of(result, base);
    }
    return result;
  }
}

// Returns the number itself in 32 bits or, if it needs more, the largest that there is. It is a single
// minimum, which compilers turn into vectors, as they do not two comparisons.
inline int32_t saturated(int64_t x) {
  constexpr uint64_t kMost = 0xffffffffu;
  constexpr uint32_t kShift = 0x80000000u;
  const uint64_t shifted = static_cast<uint64_t>(x) + kShift;
  const uint64_t limited = shifted > kMost ? kMost : shifted;
  return static_cast<int32_t>(static_cast<uint32_t>(limited) - kShift);
}

// An element of a tensor of 16-bit numbers, as it is read.
struct BFloat16 {
  uint16_t bits;
  operator float() const { return from_bfloat16(bits); }
};
struct Float16 {
  uint16_t bits;
  operator float() const { return from_float16(bits); }
};

}  // namespace selfattn::score_function
