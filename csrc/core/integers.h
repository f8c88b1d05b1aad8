// Arithmetic of sizes and indices, for every device.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace selfattn {

SELFATTN_HOST_DEVICE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
SELFATTN_HOST_DEVICE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Returns the nearest number to n that is neither below `least` nor above `most`.
SELFATTN_HOST_DEVICE constexpr int64_t limited(int64_t n, int64_t least, int64_t most) {
  return n < least ? least : (n > most ? most : n);
}

// divide_up returns how many parts of size `by` cover n; round_up returns the least multiple of `to` that is
// not below n.
SELFATTN_HOST_DEVICE constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
SELFATTN_HOST_DEVICE constexpr int64_t round_up(int64_t n, int64_t to) { return divide_up(n, to) * to; }

}  // namespace selfattn
