// Executes arithmetic of float32 and float64.
#include <cmath>

#include "instructions/choosers.h"
#include "instructions/float_rounding.h"
#include "instructions/lanes.h"

namespace ptx_machine {

namespace {

template <class T>
struct Add {
  static T f(T a, T b) { return canonical(a + b); }
};
template <class T>
struct Subtract {
  static T f(T a, T b) { return canonical(a - b); }
};
template <class T>
struct Multiply {
  static T f(T a, T b) { return canonical(a * b); }
};
template <class T>
struct Divide {
  static T f(T a, T b) { return canonical(a / b); }
};
template <class T>
struct MultiplyAdd {
  static T f(T a, T b, T c) { return canonical(std::fma(a, b, c)); }
};
// This is IEEE 754's minimumNumber: the other operand if one is NaN, and -0 is below 0.
template <class T>
struct Minimum {
  static T f(T a, T b) {
    if (a != a) return canonical(b);
    return b != b || a < b || (a == b && std::signbit(a)) ? a : b;
  }
};
template <class T>
struct Maximum {
  static T f(T a, T b) {
    if (a != a) return canonical(b);
    return b != b || a > b || (a == b && !std::signbit(a)) ? a : b;
  }
};
// With .NaN, the result is NaN if an operand is.
template <template <class> class F>
struct WithNan {
  static float f(float a, float b) { return a != a || b != b ? canonical(NAN) : F<float>::f(a, b); }
};
template <class T>
struct CopySign {
  static T f(T a, T b) { return std::copysign(b, a); }
};
template <class T>
struct Negate {
  static T f(T a) { return -a; }
};
template <class T>
struct Absolute {
  static T f(T a) { return std::fabs(a); }
};

// With .ftz, operands and results are flushed.
template <class F>
struct Flushed {
  static float f(float a, float b) { return flushed(F::f(flushed(a), flushed(b))); }
  static float f(float a, float b, float c) { return flushed(F::f(flushed(a), flushed(b), flushed(c))); }
};
// With .sat, the result is clamped to [0, 1], and NaN becomes 0.
template <class F>
struct Saturated {
  static float clamp(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
  static float f(float a, float b) { return clamp(F::f(a, b)); }
  static float f(float a, float b, float c) { return clamp(F::f(a, b, c)); }
};
template <char kMode>
struct AddRounded {
  static float f(float a, float b) {
    double error;
    const double sum = two_sum(a, b, &error);
    return canonical(round_to_float(sum, error, kMode));
  }
};
template <char kMode>
struct MultiplyRounded {
  static float f(float a, float b) { return canonical(round_to_float(static_cast<double>(a) * b, 0, kMode)); }
};
template <char kMode>
struct MultiplyAddRounded {
  static float f(float a, float b, float c) { return fma_rounded(a, b, c, kMode); }
};
// By PTX, the quotient is 0 where 2^126 < |b| < 2^128, or NaN for an infinite dividend.
struct DivideApproximately {
  static float f(float a, float b) {
    const float size = std::fabs(b);
    if (size <= 0x1p126f || size == INFINITY || size != size) return canonical(a / b);
    if (std::isinf(a) || a != a) return canonical(NAN);
    return std::copysign(0.0f, a) * std::copysign(1.0f, b);
  }
};

// F as it is, flushed or saturated.
template <class F>
Handler with_modifiers(const Statement& statement, Handler plain, Handler flushed, Handler saturated) {
  if (statement.has("sat")) return statement.has("ftz") ? nullptr : saturated;
  return statement.has("ftz") ? flushed : plain;
}
template <class F>
Handler modified_binary(const Statement& statement) {
  return with_modifiers<F>(statement, kBinary<float, F>, kBinary<float, Flushed<F>>,
                           kBinary<float, Saturated<F>>);
}
template <class F>
Handler modified_ternary(const Statement& statement) {
  return with_modifiers<F>(statement, kTernary<float, F>, kTernary<float, Flushed<F>>,
                           kTernary<float, Saturated<F>>);
}

// The handlers for modes other than rounding to nearest.
template <template <char> class F>
Handler rounded_binary(char mode) {
  return mode == 'z' ? kBinary<float, F<'z'>> : mode == 'm' ? kBinary<float, F<'m'>> : kBinary<float, F<'p'>>;
}

Handler of_float32(const Statement& statement) {
  const std::string& name = statement.name();
  const char mode = statement.rounding('n');
  if (mode != 'n') {
    if (statement.has("ftz") || statement.has("sat")) return nullptr;
    if (name == "add") return rounded_binary<AddRounded>(mode);
    if (name == "mul") return rounded_binary<MultiplyRounded>(mode);
    if (name != "fma" && name != "mad") return nullptr;
    return mode == 'z'   ? kTernary<float, MultiplyAddRounded<'z'>>
           : mode == 'm' ? kTernary<float, MultiplyAddRounded<'m'>>
                         : kTernary<float, MultiplyAddRounded<'p'>>;
  }
  if (name == "add") return modified_binary<Add<float>>(statement);
  if (name == "sub") return modified_binary<Subtract<float>>(statement);
  if (name == "mul") return modified_binary<Multiply<float>>(statement);
  if (name == "fma" || name == "mad") return modified_ternary<MultiplyAdd<float>>(statement);
  if (statement.has("sat")) return nullptr;
  if (name == "div") {
    if (!statement.has("approx") && !statement.has("full")) {
      return statement.has("ftz") ? nullptr : kBinary<float, Divide<float>>;
    }
    return modified_binary<DivideApproximately>(statement);
  }
  if (name == "copysign") return kBinary<float, CopySign<float>>;
  const bool nan = statement.has("NaN");
  if (name == "min") {
    return nan ? modified_binary<WithNan<Minimum>>(statement) : modified_binary<Minimum<float>>(statement);
  }
  if (name == "max") {
    return nan ? modified_binary<WithNan<Maximum>>(statement) : modified_binary<Maximum<float>>(statement);
  }
  return nullptr;
}

Handler of_float64(const Statement& statement) {
  const std::string& name = statement.name();
  if (statement.rounding('n') != 'n') return nullptr;
  if (name == "add") return kBinary<double, Add<double>>;
  if (name == "sub") return kBinary<double, Subtract<double>>;
  if (name == "mul") return kBinary<double, Multiply<double>>;
  if (name == "fma" || name == "mad") return kTernary<double, MultiplyAdd<double>>;
  if (name == "min") return kBinary<double, Minimum<double>>;
  if (name == "max") return kBinary<double, Maximum<double>>;
  if (name == "div") return kBinary<double, Divide<double>>;
  return name == "copysign" ? kBinary<double, CopySign<double>> : nullptr;
}

template <class T>
struct NegateInteger {
  static T f(T a) { return static_cast<T>(T(0) - a); }
};
template <class T>
struct AbsoluteInteger {
  static T f(T a) { return a < 0 ? NegateInteger<T>::f(a) : a; }
};

template <template <class> class OfFloat, template <class> class OfInteger>
Handler of_sign(const std::string& type) {
  if (type == "f32") return kUnary<float, OfFloat<float>>;
  if (type == "f64") return kUnary<double, OfFloat<double>>;
  if (type == "s16") return kUnary<s16, OfInteger<s16>>;
  if (type == "s32") return kUnary<s32, OfInteger<s32>>;
  return type == "s64" ? kUnary<s64, OfInteger<s64>> : nullptr;
}

}  // namespace

Handler float_arithmetic(const Statement& statement) {
  return statement.type() == "f32" ? of_float32(statement) : of_float64(statement);
}

bool choose_sign(Statement& statement) {
  if (statement.has("ftz")) return false;
  statement.target(statement.bits());
  statement.source(1, statement.bits());
  statement.instruction.handler = statement.name() == "neg"
                                      ? of_sign<Negate, NegateInteger>(statement.type())
                                      : of_sign<Absolute, AbsoluteInteger>(statement.type());
  return statement.instruction.handler != nullptr;
}

}  // namespace ptx_machine
