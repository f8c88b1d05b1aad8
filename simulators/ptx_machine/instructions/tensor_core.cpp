#include "instructions/tensor_core.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptx_machine {

namespace {

struct Generation {
  int group;          // how many products are added in one step
  int kept_bits;      // after the binary point of the largest term
  int zero_exponent;  // the exponent that a term of zero counts as
};

Generation generation_of(int capability) {
  if (capability >= 90) return {16, 25, -133};  // Hopper, Blackwell
  return {8, 24, -132};                         // Ampere, Ada Lovelace
}

float canonical_nan() {
  const uint32_t bits = 0x7fffffffu;
  float nan;
  std::memcpy(&nan, &bits, sizeof(nan));
  return nan;
}

// Neighbours in a row of the accumulator are computed together, because the machine spends much of its time
// here.
constexpr int kLanes = 4;
template <class T>
using Lanes [[gnu::vector_size(kLanes * sizeof(T))]] = T;
using Floats = Lanes<float>;
using Doubles = Lanes<double>;
using Ints = Lanes<int32_t>;
using Longs = Lanes<int64_t>;

// A term that adds nothing raises no exponent. (A product of 0 counts as zero_exponent, and an accumulator as
// no less.)
constexpr int kOfZero = -4096;

inline __attribute__((always_inline)) Floats load(const float* values) {
  Floats lanes;
  std::memcpy(&lanes, values, sizeof(lanes));
  return lanes;
}

inline __attribute__((always_inline)) Ints exponents_of(Floats values, int smallest, int of_zero) {
  const Ints found = ((Ints)values >> 23 & 0xff) - 127;
  const Ints exponents = found > smallest ? found : Ints{} + smallest;
  return values == 0.0f ? Ints{} + of_zero : exponents;
}

// `group` is how many products are added in one step. It is a constant, so that the loops are unrolled.
template <int group>
inline __attribute__((always_inline)) void multiply_rows(MmaOperands& operands,
                                                         const Generation& generation) {
  const int smallest = operands.smallest_exponent;

  Ints exponent_a[kMmaRows][kMmaDepth / kLanes];
  for (int m = 0; m < kMmaRows; ++m) {
    for (int k = 0; k < kMmaDepth; k += kLanes)
      exponent_a[m][k / kLanes] = exponents_of(load(operands.a[m] + k), smallest, kOfZero);
  }
  for (int column = 0; column < kMmaColumns; column += kLanes) {
    Ints exponent_b[kMmaDepth];
    Doubles b[kMmaDepth];
    for (int k = 0; k < kMmaDepth; ++k) {
      const Floats row = load(operands.b[k] + column);
      exponent_b[k] = exponents_of(row, smallest, kOfZero);
      b[k] = __builtin_convertvector(row, Doubles);
    }
    for (int m = 0; m < kMmaRows; ++m) {
      Floats sum = load(operands.d[m] + column);
      for (int first = 0; first < kMmaDepth; first += group) {
        Doubles start = __builtin_convertvector(sum, Doubles);
        Doubles terms[2] = {start, start};  // infinity or NaN if a term is; two sums need not wait
        Ints largest = exponents_of(sum, kSmallestExponentFloat32, generation.zero_exponent);
        Doubles products[kMmaDepth];
        for (int k = 0; k < group; ++k) {
          products[k] = static_cast<double>(operands.a[m][first + k]) * b[first + k];
          terms[k % 2] += products[k];
          const Ints of_product =
              exponent_a[m][(first + k) / kLanes][(first + k) % kLanes] + exponent_b[first + k];
          largest = of_product > largest ? of_product : largest;
        }

        const Doubles special = terms[0] + terms[1];
        const Longs finite = special - special == 0.0;
        Longs all = finite;
        for (int n = 1; n < kLanes; ++n) all[0] &= finite[n];
        if (all[0] == 0) {  // infinity and NaN have no integers
          start = (Doubles)((Longs)start & finite);
          for (int k = 0; k < group; ++k) products[k] = (Doubles)((Longs)products[k] & finite);
        }

        // Every term has 30 bits or less, so the terms are integers whose sum is exact in double, too.
        const Longs shift = __builtin_convertvector(generation.kept_bits - largest, Longs);
        const Doubles scale = (Doubles)((shift + 1023) << 52);
        Doubles sums[2] = {__builtin_convertvector(__builtin_convertvector(start * scale, Ints), Doubles),
                           {}};
        for (int k = 0; k < group; ++k)
          sums[k % 2] += __builtin_convertvector(__builtin_convertvector(products[k] * scale, Ints), Doubles);
        const Doubles total = (sums[0] + sums[1]) * (Doubles)((1023 - shift) << 52);

        // The result is rounded towards zero, and to infinity only from 2^128 on; there is no negative zero.
        sum = __builtin_convertvector(total, Floats);
        const Doubles rounded = __builtin_convertvector(sum, Doubles);
        const Doubles size = total < 0.0 ? -total : total, rounded_size = rounded < 0.0 ? -rounded : rounded;
        const Longs away = (rounded_size > size) & (size < 0x1p128);
        sum = (Floats)((Ints)sum + __builtin_convertvector(away, Ints)) + 0.0f;
        if (all[0] == 0) {
          for (int n = 0; n < kLanes; ++n) {
            if (finite[n] != 0) continue;
            sum[n] = std::isnan(special[n]) ? canonical_nan() : static_cast<float>(special[n]);
          }
        }
      }
      std::memcpy(operands.d[m] + column, &sum, sizeof(sum));
    }
  }
}

inline __attribute__((always_inline)) void multiply(MmaOperands& operands, int capability) {
  const Generation generation = generation_of(capability);
  if (generation.group == 8) return multiply_rows<8>(operands, generation);
  multiply_rows<16>(operands, generation);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void multiply_avx2(MmaOperands& operands, int capability) {
  multiply(operands, capability);
}
#endif

}  // namespace

void multiply_accumulate(MmaOperands& operands, int capability) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return multiply_avx2(operands, capability);
#endif
  multiply(operands, capability);
}

}  // namespace ptx_machine
