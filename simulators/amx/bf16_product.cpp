#include "bf16_product.h"

#include <cstring>
#include <xmmintrin.h>

namespace amx_emulator {

namespace {

constexpr int kColumns = kMaxRowBytes / 4;

#define AMX_EMULATOR_INLINE inline __attribute__((always_inline))

AMX_EMULATOR_INLINE float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

AMX_EMULATOR_INLINE uint32_t dword(const uint8_t* row, int n) {
  uint32_t value;
  std::memcpy(&value, row + 4 * n, sizeof(value));
  return value;
}

struct Fma {
  static AMX_EMULATOR_INLINE float apply(float a, float b, float sum) { return __builtin_fmaf(a, b, sum); }
};

// In double, the product of two bfloat16 is exact, and it has no more digits than a float. So rounding the
// sum to double's 53 digits (at least 2·24 + 2) and then to float gives the same as rounding it once.
struct Baseline {
  static AMX_EMULATOR_INLINE float apply(float a, float b, float sum) {
    return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(sum));
  }
};

// All 16 columns are computed, since compilers turn loops over them into vectors; only those of the shape are
// kept.
template <typename MultiplyAdd>
AMX_EMULATOR_INLINE void product(const ProductShape& shape, TileRows& result, const TileRows& a,
                                 const TileRows& b) {
  for (int m = 0; m < shape.rows; ++m) {
    float even[kColumns] = {}, odd[kColumns] = {};
    for (int k = 0; k < shape.pairs; ++k) {
      const uint32_t pair = dword(a[m], k);
      const float a0 = as_float(pair << 16), a1 = as_float(pair & 0xffff0000u);
      for (int n = 0; n < kColumns; ++n) {
        const uint32_t other = dword(b[k], n);
        even[n] = MultiplyAdd::apply(a0, as_float(other << 16), even[n]);
        odd[n] = MultiplyAdd::apply(a1, as_float(other & 0xffff0000u), odd[n]);
      }
    }
    for (int n = 0; n < shape.columns; ++n) {
      const float sum = as_float(dword(result[m], n)) + (even[n] + odd[n]);
      std::memcpy(result[m] + 4 * n, &sum, sizeof(sum));
    }
  }
}

// Rounds to nearest even, flushes subnormal results, takes subnormal inputs as zero, and masks all
// exceptions.
class AmxRounding {
 public:
  AmxRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8000 | 0x0040); }
  ~AmxRounding() { _mm_setcsr(before_); }
  AmxRounding(const AmxRounding&) = delete;
  AmxRounding& operator=(const AmxRounding&) = delete;

 private:
  unsigned before_;
};

// This is not inlined: to the compiler the rounding mode is no operand, so it could move arithmetic across
// the switch.
__attribute__((noinline, target("avx2,fma"))) void product_fma(const ProductShape& shape, TileRows& result,
                                                               const TileRows& a, const TileRows& b) {
  product<Fma>(shape, result, a, b);
}

__attribute__((noinline)) void product_baseline(const ProductShape& shape, TileRows& result,
                                                const TileRows& a, const TileRows& b) {
  product<Baseline>(shape, result, a, b);
}

// This is asked when the library is loaded, since a signal handler is no place to ask for the first time.
const bool kHasFma = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}();

}  // namespace

bool has_fma() { return kHasFma; }

void bf16_product_fma(const ProductShape& shape, TileRows& result, const TileRows& a, const TileRows& b) {
  const AmxRounding rounding;
  product_fma(shape, result, a, b);
}

void bf16_product_baseline(const ProductShape& shape, TileRows& result, const TileRows& a,
                           const TileRows& b) {
  const AmxRounding rounding;
  product_baseline(shape, result, a, b);
}

void bf16_product(const ProductShape& shape, TileRows& result, const TileRows& a, const TileRows& b) {
  (kHasFma ? bf16_product_fma : bf16_product_baseline)(shape, result, a, b);
}

}  // namespace amx_emulator
