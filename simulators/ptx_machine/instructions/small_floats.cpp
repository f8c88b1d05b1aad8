// Executes arithmetic of float16 and bfloat16, alone and in pairs. It goes through float, which has more than
// twice the bits of both, so that rounding twice changes nothing.
#include "instructions/choosers.h"
#include "instructions/float_rounding.h"
#include "instructions/lanes.h"
#include "instructions/small_numbers.h"

namespace ptx_machine {

namespace {

enum class Operation { kAdd, kSubtract, kMultiply, kMultiplyAdd, kMinimum, kMaximum };

float minimum(float a, float b) {
  return a != a ? b : b != b || a < b || (a == b && std::signbit(a)) ? a : b;
}
float maximum(float a, float b) {
  return a != a ? b : b != b || a > b || (a == b && !std::signbit(a)) ? a : b;
}

template <float (*kUp)(u16), u16 (*kDown)(float), Operation kOperation>
struct Small {
  static u16 one(u16 a, u16 b, u16 c) {
    const float x = kUp(a), y = kUp(b), z = kUp(c);
    switch (kOperation) {
      case Operation::kAdd:
        return kDown(x + y);
      case Operation::kSubtract:
        return kDown(x - y);
      case Operation::kMultiply:
        return kDown(x * y);
      case Operation::kMultiplyAdd: {
        // The sum is rounded to odd first, so that rounding twice changes nothing here, either.
        double error;
        const double sum = two_sum(static_cast<double>(x) * y, z, &error);
        float single = static_cast<float>(sum);
        const double lost = (sum - static_cast<double>(single)) + error;
        u32 bits = bits_as<u32>(single);
        if (lost != 0 && (bits & 1) == 0 && single - single == 0) {
          const bool outward = (lost > 0) == (single > 0);
          bits = outward ? bits | 1 : bits - 1;
          if (single != 0) single = bits_as<float>(bits);
        }
        return kDown(single);
      }
      case Operation::kMinimum:
        return kDown(minimum(x, y));
      default:
        return kDown(maximum(x, y));
    }
  }
  static u16 f(u16 a, u16 b) { return one(a, b, 0); }
  static u16 f(u16 a, u16 b, u16 c) { return one(a, b, c); }
  static u32 f(u32 a, u32 b) { return f(a, b, 0); }
  static u32 f(u32 a, u32 b, u32 c) {
    const u32 high = one(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16), static_cast<u16>(c >> 16));
    return high << 16 | one(static_cast<u16>(a), static_cast<u16>(b), static_cast<u16>(c));
  }
};

template <Operation kOperation, class F, class Word>
constexpr Handler kOfWord = kOperation == Operation::kMultiplyAdd ? kTernary<Word, F> : kBinary<Word, F>;

template <Operation kOperation>
Handler of_type(const std::string& type) {
  using Half = Small<float_from_float16, float16_from_float, kOperation>;
  using Brain = Small<float_from_bfloat16, bfloat16_from_float, kOperation>;
  if (type == "f16") return kOfWord<kOperation, Half, u16>;
  if (type == "bf16") return kOfWord<kOperation, Brain, u16>;
  return type == "f16x2" ? kOfWord<kOperation, Half, u32> : kOfWord<kOperation, Brain, u32>;
}

}  // namespace

Handler small_float_arithmetic(const Statement& statement) {
  const std::string &name = statement.name(), &type = statement.type();
  if (statement.has("sat") || statement.has("relu") || statement.has("NaN")) return nullptr;
  if (name == "add") return of_type<Operation::kAdd>(type);
  if (name == "sub") return of_type<Operation::kSubtract>(type);
  if (name == "mul") return of_type<Operation::kMultiply>(type);
  if (name == "fma") return of_type<Operation::kMultiplyAdd>(type);
  if (name == "min") return of_type<Operation::kMinimum>(type);
  return name == "max" ? of_type<Operation::kMaximum>(type) : nullptr;
}

}  // namespace ptx_machine
