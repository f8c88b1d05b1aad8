// exp and tanh on vectors, accurate to about one unit in the last place where softmax needs them.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

// e^r = 1 + r * q(r) on |r| <= ln(2)/2, by interpolation at Chebyshev nodes: relative error 5.1e-9 (float,
// below a quarter of its rounding unit) and 1.2e-19 (double). benchmarks/fit_exp.py prints the coefficients.
template <class T>
struct ExpPolynomial;

template <>
struct ExpPolynomial<float> {
  static constexpr int kTerms = 6;
  static constexpr float kCoefficients[kTerms] = {1.0f,          0.5f,           0.16666505195758111f,
                                                  0.0416664649f, 0.00836915567f, 0.001393364999630925f};
  // Weights below 2^-80 of the largest are flushed to 0: 1e-17 of float's own rounding unit, and their
  // products would be subnormal numbers, which cost a hundred cycles each.
  static constexpr float kFlushBelow = -55.451774f;
};

template <>
struct ExpPolynomial<double> {
  static constexpr int kTerms = 12;
  static constexpr double kCoefficients[kTerms] = {1.0,
                                                   0.5,
                                                   0.1666666666666668082,
                                                   0.041666666666666676774,
                                                   0.0083333333333195896163,
                                                   0.0013888888888879073994,
                                                   0.00019841269890076402829,
                                                   0.000024801587336442237861,
                                                   2.7557240887229868596e-6,
                                                   2.7557263279088496905e-7,
                                                   2.5110049204818659793e-8,
                                                   2.0918137737642736429e-9};
  static constexpr double kFlushBelow = -693.0;
};

// Splits x <= 0 into n*ln(2) + r and gives r*q(r) = e^r - 1. One multiply-add removes n*ln(2): the rounding
// error of that, |x| * epsilon, is damped by the factor e^x in everything computed from it.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec reduced_expm1(typename Simd<T>::Vec x, typename Simd<T>::Vec* n) {
  using S = Simd<T>;
  *n = S::round(S::mul(x, S::set(T(1.4426950408889634074))));
  const auto r = S::fma(*n, S::set(T(-0.69314718055994530942)), x);
  auto q = S::set(ExpPolynomial<T>::kCoefficients[ExpPolynomial<T>::kTerms - 1]);
  SELFATTN_UNROLL
  for (int i = ExpPolynomial<T>::kTerms - 2; i >= 0; --i) {
    q = S::fma(q, r, S::set(ExpPolynomial<T>::kCoefficients[i]));
  }
  return S::mul(q, r);
}

// e^x for x <= 0, exactly 1 at 0, 0 far below (also at -inf), NaN for NaN.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec exp_nonpositive(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  typename S::Vec n;
  const auto rq = reduced_expm1<T>(x, &n);
  const auto y = S::mul_pow2(S::add(rq, S::set(T(1))), n);
  return S::select(S::less(x, S::set(ExpPolynomial<T>::kFlushBelow)), S::set(T(0)), y);
}

// e^x for x <= 0 where the result will be rounded to bfloat16, in fewer steps: relative error 1.1e-7, exactly
// 1 at 0, and 0, -inf and NaN as above. 2^z = 2^floor(z) * 2^f with 2^f = 1 + f * q(f) on 0 <= f < 1. The
// weights could do with less accuracy, their sum could not: the log-sum-exp is a float.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec exp_nonpositive_short(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  const auto z = S::mul(x, S::set(T(1.4426950408889634074)));
  const auto f = S::fraction(z);
  auto q = S::fma(S::set(T(0.0018826946939539721723)), f, S::set(T(0.0089797184347966757739)));
  q = S::fma(q, f, S::set(T(0.055830604118836362919)));
  q = S::fma(q, f, S::set(T(0.24015456857058018393)));
  q = S::fma(q, f, S::set(T(0.69315229038802043011)));
  return S::mul_pow2_floor_above(S::fma(q, f, S::set(T(1))), z, S::set(T(-80)));
}

// How a score becomes a weight, in all passes: they must agree to the bit.
enum class Weigh {
  kPlain,   // exp(s - shift)
  kScaled,  // exp(s * scale - shift). The product is rounded by itself, as that of the maximum was, so that
            // the largest weight is exactly 1
  kQuick,   // the same two for weights that become two pieces, of which the last rounds by more than exp's
            // error
  kScaledQuick,
  kShort,  // the same for weights that are about to be rounded to bfloat16
  kScaledShort,
};
constexpr bool is_short(Weigh weigh) { return weigh == Weigh::kShort || weigh == Weigh::kScaledShort; }
constexpr bool is_quick(Weigh weigh) {
  return is_short(weigh) || weigh == Weigh::kQuick || weigh == Weigh::kScaledQuick;
}
constexpr bool is_scaled(Weigh weigh) {
  return weigh == Weigh::kScaled || weigh == Weigh::kScaledQuick || weigh == Weigh::kScaledShort;
}

template <class T, Weigh kWeigh>
SELFATTN_INLINE typename Simd<T>::Vec weight_of(typename Simd<T>::Vec s, typename Simd<T>::Vec scale,
                                                typename Simd<T>::Vec shift) {
  using S = Simd<T>;
  const auto x = S::sub(is_scaled(kWeigh) ? S::mul(s, scale) : s, shift);
  if constexpr (is_quick(kWeigh)) {
    return exp_nonpositive_short<T>(x);
  } else {
    return exp_nonpositive<T>(x);
  }
}

template <Weigh kWeigh>
struct Weighing {
  static constexpr Weigh kind = kWeigh;
};

// tanh by expm1, which keeps the relative accuracy of small arguments: tanh(|x|) = -m / (m + 2), m =
// expm1(-2|x|).
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec tanh(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  const auto zero = S::set(T(0));
  // expm1(-40) is -1 in every precision here; the bound keeps 2^n a normal number.
  const auto doubled = S::max(S::set(T(-40)), S::mul(S::set(T(-2)), S::abs(x)));
  typename S::Vec n;
  const auto rq = reduced_expm1<T>(doubled, &n);
  const auto power = S::mul_pow2(S::set(T(1)), n);
  const auto m = S::fma(power, rq, S::sub(power, S::set(T(1))));
  const auto magnitude = S::div(S::sub(zero, m), S::add(m, S::set(T(2))));
  const auto y = S::select(S::less(x, zero), S::sub(zero, magnitude), magnitude);
  return S::select(S::equal(x, x), y, x);  // max() above may have dropped a NaN
}

}  // namespace selfattn::cpu::SELFATTN_ISA
