#include "tensor_core.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace selfattn::emulator {

namespace {

struct Generation {
  int group_bytes;    // of one operand's elements that are added in one step
  int kept_bits;      // behind the binary point of the largest term
  int zero_exponent;  // what a term that is zero counts as
};

Generation generation_of(int capability) {
  if (capability >= 90) return {32, 25, -133};  // Hopper, Blackwell
  return {16, 24, -132};                        // Ampere, Ada Lovelace
}

int exponent_of(float value, int smallest) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const int exponent = static_cast<int>(bits >> 23 & 0xffu) - 127;
  return std::max(exponent, smallest);
}

double power_of_2(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// Towards zero, and to infinity only from 2^128 on.
float truncate(double value) {
  if (std::fabs(value) >= 0x1p128) return value < 0 ? -HUGE_VALF : HUGE_VALF;
  float result = static_cast<float>(value);
  if (std::fabs(static_cast<double>(result)) > std::fabs(value)) {
    uint32_t bits;
    std::memcpy(&bits, &result, sizeof(bits));
    --bits;
    std::memcpy(&result, &bits, sizeof(result));
  }
  return result + 0.0f;  // no negative zero
}

float canonical_nan() {
  const uint32_t bits = 0x7fffffffu;
  float nan;
  std::memcpy(&nan, &bits, sizeof(nan));
  return nan;
}

}  // namespace

void multiply_accumulate(MmaOperands& operands, int capability) {
  const Generation generation = generation_of(capability);
  const int depth = operands.depth;
  const int element_bytes = depth == 16 ? 2 : 4;
  const int group = std::min(depth, generation.group_bytes / element_bytes);
  const int smallest = operands.smallest_exponent;

  int exponent_a[kMmaRows][kMmaMostDepth];
  int exponent_b[kMmaColumns][kMmaMostDepth];
  double b[kMmaColumns][kMmaMostDepth];
  for (int k = 0; k < depth; ++k) {
    for (int m = 0; m < kMmaRows; ++m) exponent_a[m][k] = exponent_of(operands.a[m][k], smallest);
    for (int n = 0; n < kMmaColumns; ++n) {
      exponent_b[n][k] = exponent_of(operands.b[k][n], smallest);
      b[n][k] = operands.b[k][n];
    }
  }

  for (int m = 0; m < kMmaRows; ++m) {
    for (int n = 0; n < kMmaColumns; ++n) {
      float sum = operands.d[m][n];
      for (int first = 0; first < depth; first += group) {
        double products[kMmaMostDepth];
        double special = sum;  // infinity or NaN where a term is
        int largest = sum == 0.0f ? generation.zero_exponent : exponent_of(sum, kSmallestExponentFloat32);
        for (int k = 0; k < group; ++k) {
          products[k] = operands.a[m][first + k] * b[n][first + k];
          special += products[k];
          const int exponent = products[k] == 0.0 ? generation.zero_exponent
                                                  : exponent_a[m][first + k] + exponent_b[n][first + k];
          largest = std::max(largest, exponent);
        }
        if (!std::isfinite(special)) {
          sum = std::isnan(special) ? canonical_nan() : static_cast<float>(special);
          continue;
        }
        const double scale = power_of_2(generation.kept_bits - largest);
        auto total = static_cast<int64_t>(sum * scale);
        for (int k = 0; k < group; ++k) total += static_cast<int64_t>(products[k] * scale);
        sum = truncate(static_cast<double>(total) * power_of_2(largest - generation.kept_bits));
      }
      operands.d[m][n] = sum;
    }
  }
}

}  // namespace selfattn::emulator
