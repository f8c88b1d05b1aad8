// Checks of Simd<T> against scalar arithmetic, compiled once for every instruction set: test_simd.cpp
// includes it with SELFATTN_ISA defined, inside of a target region. Nothing of the standard library is
// compiled in the region, as the linker might take a copy with wide instructions for the whole program.

namespace selfattn::cpu::SELFATTN_ISA {

namespace {

// Collects what fails: the name of the operation, and which of its cases.
struct Findings {
  const char* what[20];
  int64_t which[20];
  int count = 0;

  void check(bool right, const char* name, int64_t at) {
    if (right || count == 20) return;
    what[count] = name;
    which[count++] = at;
  }
};

template <class T>
struct SimdChecks {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  static constexpr int kWidth = S::kWidth;
  static constexpr int kValues = 20;

  Findings& found;
  T values[kValues];

  explicit SimdChecks(Findings& findings) : found(findings) {
    const T infinity = std::numeric_limits<T>::infinity();
    const T some[kValues] = {T(0),
                             T(-0.0),
                             T(1),
                             T(-1),
                             T(0.5),
                             T(-0.5),
                             T(1.5),
                             T(2.5),
                             T(-2.5),
                             T(3.75),
                             T(1e30),
                             T(-1e30),
                             T(1) / T(3),
                             T(-7) / T(11),
                             std::numeric_limits<T>::min(),
                             std::numeric_limits<T>::denorm_min(),
                             infinity,
                             -infinity,
                             std::numeric_limits<T>::quiet_NaN(),
                             T(100000.5)};
    for (int i = 0; i < kValues; ++i) values[i] = some[i];
  }

  // The lanes of one operand hold neighbours in the list, so that every lane meets every value.
  Vec lanes_from(int first) const {
    T lanes[kWidth];
    for (int i = 0; i < kWidth; ++i) lanes[i] = values[(first + i) % kValues];
    return S::load(lanes);
  }
  static bool same(T a, T b) { return (a != a && b != b) || (a == b && std::signbit(a) == std::signbit(b)); }

  // Compares the first `count` lanes with function(lane).
  template <class Function>
  void expect(const char* name, Vec result, int64_t at, const Function& function, int count = kWidth) {
    T lanes[kWidth];
    S::store(lanes, result);
    for (int i = 0; i < count; ++i) found.check(same(lanes[i], function(i)), name, at * kWidth + i);
  }
  static Vec of_mask(typename S::Mask mask) { return S::select(mask, S::set(T(1)), S::set(T(0))); }

  void arithmetic(bool fused) {
    for (int i = 0; i < kValues; ++i) {
      const Vec a = lanes_from(i);
      const auto x = [&](int lane) { return values[(i + lane) % kValues]; };
      expect("abs", S::abs(a), i, [&](int lane) { return std::abs(x(lane)); });
      for (int j = 0; j < kValues; ++j) {
        const Vec b = lanes_from(j);
        const auto y = [&](int lane) { return values[(j + lane) % kValues]; };
        const int at = i * kValues + j;
        expect("add", S::add(a, b), at, [&](int lane) { return x(lane) + y(lane); });
        expect("sub", S::sub(a, b), at, [&](int lane) { return x(lane) - y(lane); });
        expect("mul", S::mul(a, b), at, [&](int lane) { return x(lane) * y(lane); });
        expect("div", S::div(a, b), at, [&](int lane) { return x(lane) / y(lane); });
        expect("max", S::max(a, b), at, [&](int lane) { return x(lane) > y(lane) ? x(lane) : y(lane); });
        expect("less", of_mask(S::less(a, b)), at, [&](int lane) { return T(x(lane) < y(lane)); });
        expect("equal", of_mask(S::equal(a, b)), at, [&](int lane) { return T(x(lane) == y(lane)); });
        expect("either", of_mask(S::either(S::less(a, b), S::equal(a, b))), at,
               [&](int lane) { return T(x(lane) <= y(lane)); });
        bool any = false;
        for (int lane = 0; lane < kWidth; ++lane) any |= x(lane) < y(lane);
        found.check(S::any(S::less(a, b)) == any, "any", at);
        const auto third = [&](int lane) { return values[(i + 3 * j + lane) % kValues]; };
        const auto sum = [&](T factor, int lane) {
          return fused ? std::fma(x(lane), factor, third(lane)) : x(lane) * factor + third(lane);
        };
        const Vec c = lanes_from(i + 3 * j);
        expect("fma", S::fma(a, b, c), at, [&](int lane) { return sum(y(lane), lane); });
        if constexpr (S::kByLane) {
          for (int of = 0; of < kWidth; ++of) {
            expect("fma_lane", S::fma_lane(a, b, of, c), at * kWidth + of,
                   [&](int lane) { return sum(y(of), lane); });
          }
        }
        if constexpr (S::kHalves) half(a, b, c, at, sum, x, y);
      }
    }
  }

  template <class Sum, class X, class Y>
  void half(Vec a, Vec b, Vec c, int at, const Sum& sum, const X& x, const Y& y) {
    using Half = LowerHalf<T>;
    constexpr int kHalf = kWidth / 2;
    expect("half add", Half::add(a, b), at, [&](int lane) { return x(lane) + y(lane); }, kHalf);
    expect("half sub", Half::sub(a, b), at, [&](int lane) { return x(lane) - y(lane); }, kHalf);
    expect("half mul", Half::mul(a, b), at, [&](int lane) { return x(lane) * y(lane); }, kHalf);
    expect("half fma", Half::fma(a, b, c), at, [&](int lane) { return sum(y(lane), lane); }, kHalf);
    const auto most = [&](int lane) { return x(lane) > y(lane) ? x(lane) : y(lane); };
    expect("half max", Half::max(a, b), at, most, kHalf);
    const auto least = [&](int lane) { return x(lane) < y(lane) ? x(lane) : y(lane); };
    expect("half less", Half::select(Half::less(a, b), a, b), at, least, kHalf);
    const auto equal = [&](int lane) { return T(x(lane) == y(lane)); };
    expect("half equal", Half::select(Half::equal(a, b), S::set(T(1)), S::set(T(0))), at, equal, kHalf);
    expect("zeros_above", Half::zeros_above(a), at, [&](int lane) { return lane < kHalf ? x(lane) : T(0); });
  }

  void powers_and_order() {
    constexpr int kLeast = sizeof(T) == 4 ? -126 : -1022, kMost = sizeof(T) == 4 ? 127 : 1023;
    for (int n = kLeast; n <= kMost; ++n) {
      const auto power = [&](int) { return static_cast<T>(std::ldexp(1.25, n)); };
      expect("mul_pow2", S::mul_pow2(S::set(T(1.25)), S::set(T(n))), n, power);
      if constexpr (S::kHalves) {
        expect("half mul_pow2", LowerHalf<T>::mul_pow2(S::set(T(1.25)), S::set(T(n))), n, power, kWidth / 2);
      }
    }
    for (int n = -4000; n < 4000; ++n) {
      const auto rounded = [&](int) { return std::nearbyint(T(n) / T(8)); };
      // Rounding may lose the sign of a zero.
      expect("round", S::add(S::round(S::set(T(n) / T(8))), S::set(T(0))), n,
             [&](int lane) { return rounded(lane) + T(0); });
      if constexpr (S::kHalves) {
        expect(
            "half round", S::add(LowerHalf<T>::round(S::set(T(n) / T(8))), S::set(T(0))), n,
            [&](int lane) { return rounded(lane) + T(0); }, kWidth / 2);
      }
    }
    T a[kWidth], b[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      a[i] = T(i);
      b[i] = T(100 + i);
    }
    const auto of = [&](int place) { return place % 2 == 0 ? a[place / 2] : b[place / 2]; };
    expect("interleave_low", S::interleave_low(S::load(a), S::load(b)), 0, of);
    expect("interleave_high", S::interleave_high(S::load(a), S::load(b)), 0,
           [&](int lane) { return of(kWidth + lane); });
    if constexpr (S::kLoadsParts) parts(a);
  }

  void parts(const T* a) {
    for (int n = 0; n <= kWidth; ++n) {
      expect("load_part", S::load_part(a, n), n, [&](int lane) { return lane < n ? a[lane] : T(0); });
      T to[kWidth];
      for (int i = 0; i < kWidth; ++i) to[i] = T(-1);
      S::store_part(to, n, S::load(a));
      for (int i = 0; i < kWidth; ++i) found.check(to[i] == (i < n ? a[i] : T(-1)), "store_part", n);
    }
  }

  void bytes_and_words() {
    const T hidden = -std::numeric_limits<T>::infinity();
    for (uint32_t pattern = 0; pattern < 256; ++pattern) {
      uint8_t bytes[kWidth];
      for (int i = 0; i < kWidth; ++i)
        bytes[i] = (pattern >> (i % 8)) & 1 ? static_cast<uint8_t>(1 << (i % 8)) : 0;
      expect("load_bool_bias", S::load_bool_bias(bytes), pattern,
             [&](int lane) { return bytes[lane] != 0 ? T(0) : hidden; });
    }
    const uint32_t words[] = {0,          1,          2,          0x7fffffff, 0x80000000,
                              0x80000001, 0xd2511f53, 0xfffffff0, 0xffffffff};
    for (uint32_t first : words) {
      for (uint32_t factor : words) {
        for (uint32_t limit : words) {
          const auto product = [&](int lane) {
            return static_cast<uint64_t>(static_cast<uint32_t>(first + static_cast<uint32_t>(lane))) * factor;
          };
          const auto high = [&](int lane) { return static_cast<uint32_t>(product(lane) >> 32); };
          const auto low = [&](int lane) { return static_cast<uint32_t>(product(lane)); };
          if (first > 0xffffffff - kWidth) continue;  // lanes count up, and need not wrap
          const auto a = S::multiply_words(S::words_from(first), factor);
          const auto mixed = S::xor_words(S::high_words(a), a, limit ^ 0x1234567u);
          expect("words", of_mask(S::words_below(mixed, limit)), first,
                 [&](int lane) { return T((high(lane) ^ low(lane) ^ limit ^ 0x1234567u) < limit); });
          expect("words_below", of_mask(S::words_below(S::words(factor), limit)), factor,
                 [&](int) { return T(factor < limit); });
        }
      }
    }
  }

  // Every value of the 16-bit types, and what lies between two of them.
  void halves_of_words() {
    for (uint32_t bits = 0; bits < 65536; bits += kWidth) {
      uint16_t stored[kWidth], back[kWidth];
      for (int i = 0; i < kWidth; ++i) stored[i] = static_cast<uint16_t>(bits + i);
      expect("load_bfloat16", S::load_bfloat16(stored), bits,
             [&](int lane) { return float_from_bfloat16(stored[lane]); });
      expect("load_float16", S::load_float16(stored), bits,
             [&](int lane) { return float_from_float16(stored[lane]); });
      for (uint32_t below : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
        float lanes[kWidth];
        for (int i = 0; i < kWidth; ++i) lanes[i] = float_from_bits((bits + i) << 16 | below);
        S::store_bfloat16(back, S::load(lanes));
        for (int i = 0; i < kWidth; ++i) {
          const bool nan = lanes[i] != lanes[i] && (back[i] & 0x7f80) == 0x7f80 && (back[i] & 0x7f) != 0;
          found.check(nan || back[i] == bfloat16_from_float(lanes[i]), "store_bfloat16", bits + i);
        }
        for (int i = 0; i < kWidth; ++i) {  // 13 bits of a float lie below those of a float16
          lanes[i] = float_from_bits(bits_from_float(float_from_float16(stored[i])) ^ below >> 3);
        }
        S::store_float16(back, S::load(lanes));
        for (int i = 0; i < kWidth; ++i) {
          const bool nan = lanes[i] != lanes[i] && (back[i] & 0x7c00) == 0x7c00 && (back[i] & 0x3ff) != 0;
          found.check(nan || back[i] == float16_from_float(lanes[i]), "store_float16", bits + i);
        }
      }
    }
  }
};

Findings check_simd(bool fused) {
  Findings findings;
  SimdChecks<float> of_float(findings);
  of_float.arithmetic(fused);
  of_float.powers_and_order();
  of_float.bytes_and_words();
  of_float.halves_of_words();
  SimdChecks<double> of_double(findings);
  of_double.arithmetic(fused);
  of_double.powers_and_order();
  of_double.bytes_and_words();
  return findings;
}

}  // namespace

}  // namespace selfattn::cpu::SELFATTN_ISA
