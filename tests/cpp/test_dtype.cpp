// Conversions between float and the 16-bit types, over all of their 65536 values.
#include "core/dtype.h"

#include <cmath>
#include <limits>

#include "check.h"

using namespace selfattn;

namespace {

constexpr uint32_t kPatterns = 65536;

std::string hex(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%04x", bits);
  return text;
}

// Returns the value of a float16 by its definition.
double float16_value(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

// Rounding is right everywhere if it is right at the midpoints of neighbours and just beside them.
template <class ToBits>
void check_rounding(uint16_t low_bits, double low, double high, ToBits to_bits) {
  const uint16_t even = (low_bits & 1) == 0 ? low_bits : static_cast<uint16_t>(low_bits + 1);
  const float middle = static_cast<float>((low + high) / 2);
  CHECK_FOR(to_bits(middle) == even, hex(low_bits));
  CHECK_FOR(to_bits(std::nextafter(middle, 0.0f)) == low_bits, hex(low_bits));
  CHECK_FOR(to_bits(std::nextafter(middle, INFINITY)) == low_bits + 1, hex(low_bits));
  CHECK_FOR(to_bits(-middle) == (even | 0x8000), hex(low_bits));
}

}  // namespace

TEST(bfloat16_is_the_upper_half_of_a_float) {
  for (uint32_t bits = 0; bits < kPatterns; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = float_from_bfloat16(half);
    CHECK_FOR(bits_from_float(value) == bits << 16, hex(bits));
    if (!std::isnan(value)) CHECK_FOR(bfloat16_from_float(value) == half, hex(bits));
  }
}

TEST(bfloat16_rounds_to_nearest_even) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    check_rounding(low, float_from_bfloat16(low), float_from_bfloat16(low + 1), bfloat16_from_float);
  }
  // Half a step above the largest value is infinity; anything below is that value.
  const float limit = float_from_bits(0x7f7f8000u);
  CHECK(bfloat16_from_float(limit) == 0x7f80);
  CHECK(bfloat16_from_float(std::nextafter(limit, 0.0f)) == 0x7f7f);
}

TEST(float16_follows_its_definition) {
  for (uint32_t bits = 0; bits < kPatterns; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const double expected = float16_value(half);
    const float value = float_from_float16(half);
    if (std::isnan(expected)) {
      CHECK_FOR(std::isnan(value), hex(bits));
      continue;
    }
    CHECK_FOR(static_cast<double>(value) == expected && std::signbit(value) == std::signbit(expected),
              hex(bits));
    CHECK_FOR(float16_from_float(value) == half, hex(bits));
  }
}

TEST(float16_rounds_to_nearest_even) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    check_rounding(low, float16_value(low), float16_value(low + 1), float16_from_float);
  }
  CHECK(float16_from_float(65520.0f) == 0x7c00);
  CHECK(float16_from_float(std::nextafter(65520.0f, 0.0f)) == 0x7bff);
  CHECK(float16_from_float(std::numeric_limits<float>::max()) == 0x7c00);
  CHECK(float16_from_float(-std::numeric_limits<float>::infinity()) == 0xfc00);
  CHECK(float16_from_float(std::numeric_limits<float>::denorm_min()) == 0);
}

TEST(nan_stays_nan_and_keeps_its_sign) {
  for (const uint32_t payload : {0x7f800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu, 0x7f80ffffu}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float nan = float_from_bits(payload | sign);
      const uint16_t b = bfloat16_from_float(nan), h = float16_from_float(nan);
      CHECK_FOR(std::isnan(float_from_bfloat16(b)) && (b >> 15) == sign >> 31, hex(payload));
      CHECK_FOR(std::isnan(float_from_float16(h)) && (h >> 15) == sign >> 31, hex(payload));
    }
  }
}

TEST(elements_of_every_dtype_are_stored_and_loaded) {
  alignas(8) unsigned char memory[64];
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t index = 0; index < 4; ++index) store_element<double>(memory, dtype, index, 0.5 * index - 1);
    for (int64_t index = 0; index < 4; ++index) {
      CHECK_FOR(load_element<double>(memory, dtype, index) == 0.5 * index - 1, std::string(name_of(dtype)));
      CHECK_FOR(load_element<float>(memory, dtype, index) == 0.5f * index - 1, std::string(name_of(dtype)));
    }
  }
  memory[0] = 0;
  memory[1] = 1;
  memory[2] = 255;  // any other value is true as well
  CHECK(load_element<float>(memory, DType::kBool, 0) == 0);
  CHECK(load_element<float>(memory, DType::kBool, 1) == 1);
  CHECK(load_element<double>(memory, DType::kBool, 2) == 1);
}

TEST(finite_doubles_stay_finite_as_floats) {
  const double infinity = std::numeric_limits<double>::infinity();
  const float largest = std::numeric_limits<float>::max();
  const double values[] = {1e300, -1e300, infinity, -infinity, 1.5, -std::numeric_limits<double>::max()};
  const float expected[] = {largest, -largest, INFINITY, -INFINITY, 1.5f, -largest};
  for (int n = 0; n < 6; ++n) {
    CHECK(load_element<float>(values, DType::kFloat64, n) == expected[n]);
    CHECK(load_element<double>(values, DType::kFloat64, n) == values[n]);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(load_element<float>(&nan, DType::kFloat64, 0)));
}
