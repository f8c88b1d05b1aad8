// exp and tanh on vectors, to about one unit in the last place where softmax needs them.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

constexpr double kLog2E = 1.4426950408889634074;

// e^r = 1 + r * q(r) on |r| <= ln(2)/2, by interpolation at Chebyshev nodes: relative error 5.1e-9 (float,
// below a quarter of its rounding unit) and 1.2e-19 (double). benchmarks/fit_exp.py prints the coefficients.
template <class T>
struct ExpPolynomial;

template <>
struct ExpPolynomial<float> {
  static constexpr int kTerms = 6;
  static constexpr float kCoefficients[kTerms] = {1.0f,          0.5f,           0.16666505195758111f,
                                                  0.0416664649f, 0.00836915567f, 0.001393364999630925f};
  // Weights below 2^-80 of the largest are flushed to 0. They are 1e-17 of float's own rounding unit, and
  // their products would be subnormal numbers, which cost a hundred cycles each.
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

// Splits x <= 0 into n*ln(2) + r and gives r*q(r) = e^r - 1. One multiply-add removes n*ln(2); its rounding
// error, |x| * epsilon, is damped by the factor e^x in everything computed from it.
template <class T, class S = Simd<T>>
SELFATTN_INLINE typename S::Vec reduced_expm1(typename S::Vec x, typename S::Vec* n) {
  *n = S::round(S::mul(x, S::set(T(kLog2E))));
  const auto r = S::fma(*n, S::set(T(-0.69314718055994530942)), x);
  auto q = S::set(ExpPolynomial<T>::kCoefficients[ExpPolynomial<T>::kTerms - 1]);
  SELFATTN_UNROLL
  for (int i = ExpPolynomial<T>::kTerms - 2; i >= 0; --i) {
    q = S::fma(q, r, S::set(ExpPolynomial<T>::kCoefficients[i]));
  }
  return S::mul(q, r);
}

// e^x for x <= 0, exactly 1 at 0, 0 far below (also at -inf), NaN for NaN.
template <class T, class S = Simd<T>>
SELFATTN_INLINE typename S::Vec exp_nonpositive(typename S::Vec x) {
  typename S::Vec n;
  const auto rq = reduced_expm1<T, S>(x, &n);
  const auto y = S::mul_pow2(S::add(rq, S::set(T(1))), n);
  return S::select(S::less(x, S::set(ExpPolynomial<T>::kFlushBelow)), S::set(T(0)), y);
}

// Coefficients of q in 2^f = 1 + f * q(f) on 0 <= f < 1. With 4, 5 and 6 terms the relative errors are
// 3.8e-6, 1.1e-7 and 2.7e-9.
template <int kTerms>
struct PowerPolynomial;

template <>
struct PowerPolynomial<4> {
  static constexpr float kCoefficients[4] = {0.69302325715539314115f, 0.2414167864723411582f,
                                             0.052000131789380227653f, 0.013555418097987854618f};
};
template <>
struct PowerPolynomial<5> {
  static constexpr float kCoefficients[5] = {0.69315229038802043011f, 0.24015456857058018393f,
                                             0.055830604118836362919f, 0.0089797184347966757739f,
                                             0.0018826946939539721723f};
};
template <>
struct PowerPolynomial<6> {
  static constexpr float kCoefficients[6] = {0.69314700946749823412f,   0.24022981908840950459f,
                                             0.055482852358585012329f,  0.0096804336836602015981f,
                                             0.0012421636208647254779f, 0.00021771877777212075812f};
};

// 2^z for z <= 0 as 2^floor(z) * 2^f, in fewer steps where processors have instructions for the parts. It is
// exactly 1 at 0, and like exp_nonpositive far below, at -inf and for NaN.
template <class T, int kTerms>
SELFATTN_INLINE typename Simd<T>::Vec exp2_nonpositive(typename Simd<T>::Vec z) {
  using S = Simd<T>;
  const auto f = S::fraction(z);
  auto q = S::set(PowerPolynomial<kTerms>::kCoefficients[kTerms - 1]);
  SELFATTN_UNROLL
  for (int i = kTerms - 2; i >= 0; --i) q = S::fma(q, f, S::set(PowerPolynomial<kTerms>::kCoefficients[i]));
  return S::mul_pow2_floor_above(S::fma(q, f, S::set(T(1))), z, S::set(T(-80)));
}

// e^x by exp2_nonpositive. The rounding error of z, |x| * epsilon, is damped by e^x here, too.
template <class T, int kTerms>
SELFATTN_INLINE typename Simd<T>::Vec exp_nonpositive_short(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  return exp2_nonpositive<T, kTerms>(S::mul(x, S::set(T(kLog2E))));
}

// How a score becomes a weight. All passes must agree to the bit.
enum class Weigh {
  kWhole,        // exp(s - shift)
  kThreePieces,  // the same, for weights that become three bfloat16 pieces
  kTwoPieces,    // two pieces round by more than the error of a shorter exp
  kOnePiece,     // a weight needs still less accuracy, but its sum becomes a log-sum-exp
  // exp(s * scale - shift). The product is rounded by itself, as that of the maximum was, so that the largest
  // weight is exactly 1.
  kScaledThreePieces,
  kScaledTwoPieces,
  kScaledOnePiece,
};
constexpr bool is_scaled(Weigh weigh) { return weigh >= Weigh::kScaledThreePieces; }
constexpr int pieces_of(Weigh weigh) {
  return weigh == Weigh::kOnePiece || weigh == Weigh::kScaledOnePiece     ? 1
         : weigh == Weigh::kTwoPieces || weigh == Weigh::kScaledTwoPieces ? 2
                                                                          : 3;
}
constexpr bool is_one_piece(Weigh weigh) { return pieces_of(weigh) == 1; }
constexpr int exp_terms(Weigh weigh) { return 3 + pieces_of(weigh); }

template <class T, Weigh kWeigh, class S = Simd<T>>
SELFATTN_INLINE typename S::Vec weight_of(typename S::Vec s, typename S::Vec scale, typename S::Vec shift) {
  const auto x = S::sub(is_scaled(kWeigh) ? S::mul(s, scale) : s, shift);
  if constexpr (kWeigh == Weigh::kWhole) {
    return exp_nonpositive<T, S>(x);
  } else {
    return exp_nonpositive_short<T, exp_terms(kWeigh)>(x);
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
