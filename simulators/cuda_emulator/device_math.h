// CUDA's arithmetic functions. Those that a GPU approximates are rounded correctly here, or nearly so,
// because nothing may depend on the bits of an approximation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned int min(unsigned int a, unsigned int b) { return b < a ? b : a; }
inline unsigned int max(unsigned int a, unsigned int b) { return a < b ? b : a; }
inline long min(long a, long b) { return b < a ? b : a; }
inline long max(long a, long b) { return a < b ? b : a; }
inline long long min(long long a, long long b) { return b < a ? b : a; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
// As on the GPU, the operand that is a number wins over NaN.
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }

inline float __expf(float x) { return ::exp2f(x * 1.4426950408889634f); }
inline float __logf(float x) { return ::log2f(x) * 0.6931471805599453f; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / ::sqrt(static_cast<double>(x))); }

// These are single operations, which the compiler may not fuse with others.
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return ::fmaf(x, y, z); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }

inline unsigned int __float_as_uint(float x) {
  unsigned int bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned int>(bits)); }

inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(bits)); }
inline unsigned int __umulhi(unsigned int x, unsigned int y) {
  return static_cast<unsigned int>((static_cast<uint64_t>(x) * y) >> 32);
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stwb(T* address, T value) {
  *address = value;
}
