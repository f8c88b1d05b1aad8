// TDPBF16PS against its definition in Intel's manual, written once more in extended precision. On a processor
// with AMX the same checks run on the processor.
#include "amx_instructions.h"
#include "check.h"

#if !(defined(__linux__) && defined(__x86_64__))

TEST(skipped) { std::printf("skipped: AMX is an extension of x86-64, and its emulator needs Linux\n"); }

#else

#include <xmmintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "../../simulators/amx/amx_emulator.h"
#include "../../simulators/amx/bf16_product.h"
#include "core/philox.h"

using namespace selfattn;
using namespace selfattn::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSmallest = std::numeric_limits<float>::min();  // the smallest normal number

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : bits_of(a) == bits_of(b); }

// Tiles as the processor has them: rows of 64 bytes. A and B hold bfloat16, C float.
struct Tiles {
  uint16_t a[16][32] = {}, b[16][32] = {};
  float c[16][16] = {};
};

uint16_t bf16(float value) {
  return static_cast<uint16_t>(bits_of(value) >> 16);
}  // of values that are exact

// ---- the definition ----

long double input(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

// Rounds once, to float with unlimited exponents, and then turns numbers too small for a normal float into
// zero.
float rounded(long double value) {
  if (std::fabs(value) < std::ldexp(1.0L, -100)) {
    const float scaled = static_cast<float>(std::ldexp(value, 100));
    if (std::fabs(scaled) < std::ldexp(kSmallest, 100))
      return std::copysign(0.0f, static_cast<float>(scaled));
  }
  return static_cast<float>(value);
}

// x87's 64 digits hold the product exactly, and are enough for the sum to round as if once.
float fused(uint16_t a, uint16_t b, float sum) {
  const auto wide = [](uint16_t value) { return input(from_bits(static_cast<uint32_t>(value) << 16)); };
  return rounded(wide(a) * wide(b) + input(sum));
}

float added(float a, float b) { return rounded(input(a) + input(b)); }

void define(Tiles& t, int rows, int pairs, int columns) {
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      float even = 0.0f, odd = 0.0f;
      for (int k = 0; k < pairs; ++k) {
        even = fused(t.a[m][2 * k], t.b[k][2 * n], even);
        odd = fused(t.a[m][2 * k + 1], t.b[k][2 * n + 1], odd);
      }
      t.c[m][n] = added(t.c[m][n], added(even, odd));
    }
  }
}

// ---- the instruction ----

void execute(Tiles& t, int rows, int pairs, int columns) {
  ldtilecfg(TileConfig().tile(2, rows, 4 * columns).tile(7, rows, 4 * pairs).tile(4, pairs, 4 * columns));
  TILELOADD(2, t.c, 64);
  TILELOADD(7, t.a, 64);
  TILELOADD(4, t.b, 64);
  TDPBF16PS(2, 7, 4);
  TILESTORED(2, t.c, 64);
  tilerelease();
}

bool equal(const Tiles& x, const Tiles& y) {
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      if (!same(x.c[m][n], y.c[m][n])) return false;
    }
  }
  return true;
}

bool agrees(const Tiles& given, int rows, int pairs, int columns) {
  Tiles expected = given, got = given;
  define(expected, rows, pairs, columns);
  execute(got, rows, pairs, columns);
  return equal(expected, got);
}

// Computes one product and one sum: c + a·b, rounded as c + (a·b + 0).
float one(float a, float b, float c) {
  Tiles t;
  t.a[0][0] = bf16(a);
  t.b[0][0] = bf16(b);
  t.c[0][0] = c;
  execute(t, 1, 1, 1);
  return t.c[0][0];
}

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  uint32_t bits() { return philox(seed_, 0, 0, 0, next_++).word[0]; }
  int below(int limit) { return static_cast<int>(bits() % static_cast<uint32_t>(limit)); }
  // Returns any pattern of bits, or one whose exponent is within `spread` of that of 1.
  uint32_t pattern(int spread) {
    const uint32_t random = bits();
    if (spread == 0) return random;
    const auto exponent = static_cast<uint32_t>(127 - spread + below(2 * spread + 1));
    return (random & 0x807fffffu) | (exponent << 23);
  }

 private:
  uint64_t seed_;
  uint32_t next_ = 0;
};

Tiles random_tiles(Random& random, int spread) {
  Tiles t;
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 32; ++n) {
      t.a[m][n] = static_cast<uint16_t>(random.pattern(spread) >> 16);
      t.b[m][n] = static_cast<uint16_t>(random.pattern(spread) >> 16);
    }
    for (int n = 0; n < 16; ++n) t.c[m][n] = from_bits(random.pattern(spread));
  }
  return t;
}

TEST(the_definition_rounds_as_it_says) {
  const float below = std::nextafter(kSmallest, 0.0f);
  CHECK(rounded(below) == 0.0f && std::signbit(rounded(-static_cast<long double>(below))));
  CHECK(rounded(kSmallest) == kSmallest);
  // The number rounds up to a normal float although it is less than one.
  CHECK(rounded(std::ldexp(1.0L - std::ldexp(1.0L, -26), -126)) == kSmallest);
  CHECK(rounded(1.0L + std::ldexp(1.0L, -24)) == 1.0f);
  CHECK(rounded(1.0L + 3 * std::ldexp(1.0L, -24)) == 1.0f + std::ldexp(1.0f, -22));
}

TEST(ordinary_numbers) {
  Random random(1);
  for (int n = 0; n < 40; ++n) CHECK(agrees(random_tiles(random, 4), 16, 16, 16));
}

TEST(wide_exponents_round_in_every_place) {
  Random random(2);
  for (const int spread : {12, 30, 60, 64}) {
    for (int n = 0; n < 20; ++n) CHECK(agrees(random_tiles(random, spread), 16, 16, 16));
  }
}

TEST(products_around_the_smallest_number) {
  Random random(3);
  for (int n = 0; n < 60; ++n) {
    Tiles t = random_tiles(random, 3);
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 32; ++k) t.b[m][k] = static_cast<uint16_t>(t.b[m][k] - ((124 + n % 4) << 7));
      for (int k = 0; k < 16; ++k) t.c[m][k] = std::ldexp(t.c[m][k], -126);
    }
    CHECK_FOR(agrees(t, 1 + random.below(16), 1 + random.below(3), 16), std::to_string(n));
  }
}

TEST(any_bits_at_all) {
  Random random(4);
  for (int n = 0; n < 100; ++n) CHECK(agrees(random_tiles(random, 0), 16, 1 + random.below(16), 16));
}

TEST(every_shape) {
  Random random(5);
  for (int rows = 1; rows <= 16; rows += 3) {
    for (int pairs = 1; pairs <= 16; ++pairs) {
      for (int columns = 1; columns <= 16; columns += 2) {
        CHECK_FOR(agrees(random_tiles(random, 8), rows, pairs, columns),
                  std::to_string(rows) + "x" + std::to_string(pairs) + "x" + std::to_string(columns));
      }
    }
  }
}

TEST(cases_by_hand) {
  CHECK(one(3.0f, 5.0f, 7.0f) == 22.0f);
  CHECK(one(std::ldexp(1.0f, -64), std::ldexp(1.0f, -63), 0.0f) == 0.0f);
  CHECK(one(std::ldexp(1.0f, -63), std::ldexp(1.0f, -63), 0.0f) == kSmallest);
  CHECK(one(std::ldexp(1.0f, -130), std::ldexp(1.0f, 100), 0.0f) == 0.0f);  // a subnormal factor
  CHECK(one(0.0f, 0.0f, std::ldexp(1.0f, -130)) == 0.0f);                   // a subnormal accumulator
  CHECK(one(1.0f, -kSmallest, 1.5f * kSmallest) == 0.0f);                   // a subnormal sum
  CHECK(!std::signbit(one(-0.0f, 1.0f, -0.0f)));                            // sums start with +0
  CHECK(std::signbit(one(-1.0f, std::ldexp(1.0f, -140), -1.0f)));
  CHECK(one(std::ldexp(1.0f, 100), std::ldexp(1.0f, 100), 0.0f) == kInf);
  CHECK(one(kInf, -2.0f, 1.0f) == -kInf);
  CHECK(std::isnan(one(kInf, 0.0f, 1.0f)));
  CHECK(std::isnan(one(kInf, std::ldexp(1.0f, -130), 1.0f)));  // the subnormal factor counts as zero
  CHECK(std::isnan(one(kInf, 1.0f, -kInf)));
  CHECK(std::isnan(one(kNan, 0.0f, 1.0f)));
  CHECK(std::isnan(one(0.0f, 0.0f, kNan)));
}

TEST(even_and_odd_are_separate_sums) {
  // In one chain, 2²⁴ + 1 + 1 − 2²⁴ loses both ones; the even numbers alone give 0 and the odd ones give 2.
  Tiles t;
  const float big = std::ldexp(1.0f, 24);
  const float even[3] = {big, 0.0f, -big}, odd[3] = {1.0f, 1.0f, 0.0f};
  for (int k = 0; k < 3; ++k) {
    t.a[0][2 * k] = bf16(even[k]);
    t.a[0][2 * k + 1] = bf16(odd[k]);
    t.b[k][0] = t.b[k][1] = bf16(1.0f);
  }
  execute(t, 1, 3, 1);
  CHECK(t.c[0][0] == 2.0f);

  // The accumulator is added last: 2²⁴ + (1 + 1), not (2²⁴ + 1) + 1.
  Tiles last;
  last.a[0][0] = last.a[0][1] = last.b[0][0] = last.b[0][1] = bf16(1.0f);
  last.c[0][0] = big;
  execute(last, 1, 1, 1);
  CHECK(last.c[0][0] == big + 2.0f);
}

TEST(callers_rounding_plays_no_part) {
  Random random(6);
  const unsigned before = _mm_getcsr();
  for (const unsigned csr : {0x1f80u, 0x3f80u, 0x5f80u, 0x7f80u, 0x9fc0u}) {
    const Tiles given = random_tiles(random, 64);
    Tiles expected = given, got = given;
    define(expected, 16, 16, 16);
    _mm_setcsr(csr);
    execute(got, 16, 16, 16);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK(after == csr);
    CHECK(std::memcmp(expected.c, got.c, sizeof(got.c)) == 0);
  }
}

TEST(with_and_without_fma) {
  if (!amx_emulator::has_fma()) {
    std::printf("skipped: this processor has no fused multiply-add\n");
    return;
  }
  Random random(7);
  for (const int spread : {4, 60, 0}) {
    for (int n = 0; n < 50; ++n) {
      const Tiles given = random_tiles(random, spread);
      Tiles fma = given, baseline = given;
      for (Tiles* t : {&fma, &baseline}) {
        amx_emulator::TileRows a, b, c;
        std::memcpy(a, t->a, sizeof(a));
        std::memcpy(b, t->b, sizeof(b));
        std::memcpy(c, t->c, sizeof(c));
        const amx_emulator::ProductShape shape{16, 16, 16};
        (t == &fma ? amx_emulator::bf16_product_fma : amx_emulator::bf16_product_baseline)(shape, c, a, b);
        std::memcpy(t->c, c, sizeof(c));
      }
      CHECK(equal(fma, baseline));
    }
  }
}

TEST(the_instructions_ran) {
  std::printf("%s\n", native_amx() ? "on this processor's AMX" : "in the emulator");
  if (!native_amx()) CHECK(selfattn_amx_emulator_count("tdpbf16ps") > 1000);
}

}  // namespace

#endif
