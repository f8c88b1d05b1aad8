// Numbers of 32 bits as PTX gives them. NaN is always the same one, .ftz flushes subnormal ones, and sums can
// be rounded in four directions.
#pragma once

#include <cmath>

#include "types.h"

namespace ptx_machine {

// PTX promises nothing about the bits of a NaN but for these, which single precision results have.
inline float canonical(float value) { return value != value ? bits_as<float>(0x7fffffffu) : value; }
inline double canonical(double value) { return value; }

inline float flushed(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

// hi + lo rounded to float by a mode: 'n' nearest, 'z' to zero, 'm' down, 'p' up. `hi` is hi + lo rounded to
// double.
inline float round_to_float(double hi, double lo, char mode) {
  const auto nearest = static_cast<float>(hi);
  if (!std::isfinite(hi)) return nearest;
  if (mode == 'n') {
    // Ties of hi that lo breaks.
    const float up = std::nextafter(nearest, INFINITY), down = std::nextafter(nearest, -INFINITY);
    if (lo > 0 && hi == (static_cast<double>(nearest) + up) / 2) return up;
    if (lo < 0 && hi == (static_cast<double>(nearest) + down) / 2) return down;
    return nearest;
  }
  const double over = static_cast<double>(nearest) - hi;  // exact, or too large to matter
  const bool rounds_down = mode == 'm' || (mode == 'z' && (hi > 0 || (hi == 0 && lo > 0)));
  if (rounds_down && over > lo) return std::nextafter(nearest, -INFINITY);
  if (!rounds_down && over < lo) return std::nextafter(nearest, INFINITY);
  return nearest;
}

// The sum, and what its rounding took away (Knuth).
inline double two_sum(double a, double b, double* error) {
  const double sum = a + b, of_b = sum - a;
  *error = std::isfinite(sum) ? (a - (sum - of_b)) + (b - of_b) : 0;
  return sum;
}

inline float fma_rounded(float a, float b, float c, char mode) {
  double error;
  const double sum = two_sum(static_cast<double>(a) * b, c, &error);
  return canonical(round_to_float(sum, error, mode));
}

}  // namespace ptx_machine
