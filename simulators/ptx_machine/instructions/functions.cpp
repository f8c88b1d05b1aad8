// Executes functions of one number: exponentials, logarithms, reciprocals, roots.
#include <cmath>

#include "instructions/choosers.h"
#include "instructions/float_rounding.h"
#include "instructions/lanes.h"
#include "options.h"

namespace ptx_machine {

namespace {

// Makes an approximation wrong by a few units, always the same for the same number.
float approximate(float exact) {
  const int most = options().approximation;
  if (most == 0 || !std::isfinite(exact) || exact == 0) return exact;
  const u32 bits = bits_as<u32>(exact);
  const int off = static_cast<int>((bits * 2654435761u >> 8) % static_cast<u32>(2 * most + 1)) - most;
  const auto moved = bits_as<float>(bits + static_cast<u32>(off));
  return std::isnormal(moved) ? moved : exact;
}

// Results for integers are exact, because CUDA's own functions rely on that.
struct Exp2 {
  static float f(float a) { return a == std::rint(a) ? std::exp2(a) : approximate(canonical(std::exp2(a))); }
};
struct Log2 {
  static float f(float a) { return approximate(canonical(std::log2(a))); }
};
struct Reciprocal {
  static float f(float a) { return canonical(1.0f / a); }
};
struct ReciprocalApproximate {
  static float f(float a) { return approximate(Reciprocal::f(a)); }
};
struct ReciprocalRoot {
  static float f(float a) {
    return approximate(canonical(static_cast<float>(1.0 / std::sqrt(static_cast<double>(a)))));
  }
};
struct Root {
  static float f(float a) { return canonical(std::sqrt(a)); }
};
struct Tanh {
  static float f(float a) { return approximate(canonical(std::tanh(a))); }
};

struct RootOfDouble {
  static double f(double a) { return std::sqrt(a); }
};
struct ReciprocalOfDouble {
  static double f(double a) { return 1.0 / a; }
};
// The approximations of float64 use only the upper 32 bits, and the lower 32 bits of their results are 0.
inline double upper_half(double value) {
  return bits_as<double>(bits_as<u64>(value) & 0xffffffff00000000ull);
}
struct ReciprocalOfDoubleApproximate {
  static double f(double a) {
    const double x = upper_half(a);
    const double y = std::fabs(x) < 0x1p-1022 ? std::copysign(INFINITY, x) : 1.0 / x;
    if (y != y) return y;
    return std::fabs(y) < 0x1p-1022 ? std::copysign(0.0, y) : upper_half(y);
  }
};
struct ReciprocalRootOfDouble {
  static double f(double a) { return upper_half(1.0 / std::sqrt(a)); }
};

template <class F>
struct Flushed {
  static float f(float a) { return flushed(F::f(flushed(a))); }
};

template <class F>
Handler with_ftz(const Statement& statement) {
  return statement.has("ftz") ? kUnary<float, Flushed<F>> : kUnary<float, F>;
}

Handler of_float32(const Statement& statement) {
  const std::string& name = statement.name();
  const bool approximate = statement.has("approx");
  if (!approximate && statement.rounding('n') != 'n') return nullptr;
  if (name == "ex2") return with_ftz<Exp2>(statement);
  if (name == "lg2") return with_ftz<Log2>(statement);
  if (name == "rsqrt") return with_ftz<ReciprocalRoot>(statement);
  if (name == "sqrt") return with_ftz<Root>(statement);
  if (name == "tanh") return with_ftz<Tanh>(statement);
  return approximate ? with_ftz<ReciprocalApproximate>(statement) : with_ftz<Reciprocal>(statement);
}

Handler of_float64(const Statement& statement) {
  const std::string& name = statement.name();
  if (name == "sqrt") return kUnary<double, RootOfDouble>;
  if (name == "rsqrt") return kUnary<double, ReciprocalRootOfDouble>;
  if (name != "rcp") return nullptr;
  return statement.has("approx") ? kUnary<double, ReciprocalOfDoubleApproximate>
                                 : kUnary<double, ReciprocalOfDouble>;
}

}  // namespace

bool choose_function(Statement& statement) {
  const std::string& type = statement.type();
  if (type != "f32" && type != "f64") return false;
  statement.target(statement.bits());
  statement.source(1, statement.bits());
  statement.instruction.handler = type == "f32" ? of_float32(statement) : of_float64(statement);
  return statement.instruction.handler != nullptr;
}

}  // namespace ptx_machine
