// Executes logic of bits and of predicates, comparisons, and choices.
#include <cmath>

#include "instructions/choosers.h"
#include "instructions/lanes.h"

namespace ptx_machine {

namespace {

template <class T>
struct And {
  static T f(T a, T b) { return static_cast<T>(a & b); }
};
template <class T>
struct Or {
  static T f(T a, T b) { return static_cast<T>(a | b); }
};
template <class T>
struct Xor {
  static T f(T a, T b) { return static_cast<T>(a ^ b); }
};
template <class T>
struct Not {
  static T f(T a) { return static_cast<T>(~a); }
};

// Combines predicates, which are masks of lanes.
template <template <class> class F>
void logic_of_two(Warp& warp, const Instruction& ins, u32 mask) {
  const u32 result = F<u32>::f(warp.predicate(ins.operands[1]), warp.predicate(ins.operands[2]));
  warp.set_predicate(ins.operands[0], result, mask);
}
void logic_not(Warp& warp, const Instruction& ins, u32 mask) {
  warp.set_predicate(ins.operands[0], ~warp.predicate(ins.operands[1]), mask);
}

// Returns a mask whose bit l says whether byte l is 1; the bytes are 0 or 1.
u32 mask_of(const u8 (&truths)[kLanes]) {
  u32 mask = 0;
  for (int n = 0; n < kLanes; n += 8) {
    u64 bytes;
    std::memcpy(&bytes, truths + n, sizeof(bytes));
    mask |= static_cast<u32>(bytes * 0x0102040810204080ull >> 56) << n;
  }
  return mask;
}

enum class Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
constexpr int kOfIntegers = 6;  // how many of the comparisons are for integers
enum class Combination : u8 { kNone, kAnd, kOr, kXor };

template <Comparison kHow, class T>
bool compare(T a, T b) {
  const bool unordered = a != a || b != b;
  switch (kHow) {
    case Comparison::kEq:
      return a == b;
    case Comparison::kNe:
      return !unordered && a != b;
    case Comparison::kLt:
      return a < b;
    case Comparison::kLe:
      return a <= b;
    case Comparison::kGt:
      return a > b;
    case Comparison::kGe:
      return a >= b;
    case Comparison::kEqu:
      return unordered || a == b;
    case Comparison::kNeu:
      return a != b;
    case Comparison::kLtu:
      return !(a >= b);
    case Comparison::kLeu:
      return !(a > b);
    case Comparison::kGtu:
      return !(a <= b);
    case Comparison::kGeu:
      return !(a < b);
    case Comparison::kNum:
      return !unordered;
    default:
      return unordered;
  }
}

// operands: the result, its opposite, a, b, and a predicate c with which both results are combined
template <class T, Comparison kHow>
void set_predicate(Warp& warp, const Instruction& ins, u32 mask) {
  const T *a = warp.source<T>(ins, 2), *b = warp.source<T>(ins, 3);
  u8 truths[kLanes];
  for (int l = 0; l < kLanes; ++l) truths[l] = compare<kHow>(a[l], b[l]) ? 1 : 0;
  const u32 truth = mask_of(truths), c = warp.predicate(ins.operands[4]);
  const auto combined = [&](u32 value) {
    switch (static_cast<Combination>(ins.variant)) {
      case Combination::kAnd:
        return value & c;
      case Combination::kOr:
        return value | c;
      case Combination::kXor:
        return value ^ c;
      default:
        return value;
    }
  };
  const u32 first = combined(truth), second = combined(~truth);
  warp.set_predicate(ins.operands[0], first, mask);
  warp.set_predicate(ins.operands[1], second, mask);
}

template <class T>
Handler set_predicate_by(int how) {
  using C = Comparison;
  static const Handler table[] = {
      &set_predicate<T, C::kEq>,  &set_predicate<T, C::kNe>,  &set_predicate<T, C::kLt>,
      &set_predicate<T, C::kLe>,  &set_predicate<T, C::kGt>,  &set_predicate<T, C::kGe>,
      &set_predicate<T, C::kEqu>, &set_predicate<T, C::kNeu>, &set_predicate<T, C::kLtu>,
      &set_predicate<T, C::kLeu>, &set_predicate<T, C::kGtu>, &set_predicate<T, C::kGeu>,
      &set_predicate<T, C::kNum>, &set_predicate<T, C::kNan>};
  return table[how];
}

Handler comparison_of(const std::string& type, int how) {
  if (type == "f32") return set_predicate_by<float>(how);
  if (type == "f64") return set_predicate_by<double>(how);
  if (how >= kOfIntegers || type[0] == 'f') return nullptr;
  if (type == "s16") return set_predicate_by<s16>(how);
  if (type == "s32") return set_predicate_by<s32>(how);
  if (type == "s64") return set_predicate_by<s64>(how);
  const int bits = bits_of_type(type);
  return bits == 16   ? set_predicate_by<u16>(how)
         : bits == 32 ? set_predicate_by<u32>(how)
         : bits == 64 ? set_predicate_by<u64>(how)
                      : nullptr;
}

bool choose_setp(Statement& statement) {
  Instruction& ins = statement.instruction;
  std::string& word = statement.words.at(1);
  // Unsigned integers have other names for comparisons: lower, lower or same, and so on.
  const char* const aliases[][2] = {{"lo", "lt"}, {"ls", "le"}, {"hi", "gt"}, {"hs", "ge"}};
  for (const auto& alias : aliases) {
    if (word == alias[0]) word = alias[1];
  }
  const int how = statement.which(
      {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  if (how < 0 || statement.has("ftz")) return false;
  ins.variant = static_cast<u8>(statement.which({"and", "or", "xor"}) + 1);
  const Operand& result = statement.operands.at(0);
  const bool two = result.kind == Operand::Kind::kList;
  ins.operands[0] = statement.predicate(two ? result.list.at(0) : result);
  if (two) ins.operands[1] = statement.predicate(result.list.at(1));
  ins.operands[2] = statement.builder.source(statement.operands.at(1), statement.bits());
  ins.operands[3] = statement.builder.source(statement.operands.at(2), statement.bits());
  if (ins.variant != 0) ins.operands[4] = statement.predicate(statement.operands.at(3));
  ins.handler = comparison_of(statement.type(), how);
  return ins.handler != nullptr;
}

template <class T>
void select(Warp& warp, const Instruction& ins, u32 mask) {
  T* d = warp.target<T>(ins, 0);
  const T *a = warp.source<T>(ins, 1), *b = warp.source<T>(ins, 2);
  const u32 chosen = warp.predicate(ins.operands[3]);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) {
    const T value = on(chosen, l) ? a[l] : b[l];
    d[l] = on(mask, l) ? value : d[l];
  }
}

template <class T>
void test_predicate(Warp& warp, const Instruction& ins, u32 mask) {
  const T* a = warp.source<T>(ins, 1);
  u32 result = 0;
  for (int l = 0; l < kLanes; ++l) {
    const int kind = std::fpclassify(a[l]);
    const bool truths[] = {kind != FP_INFINITE && kind != FP_NAN,
                           kind == FP_INFINITE,
                           kind != FP_NAN,
                           kind == FP_NAN,
                           kind == FP_NORMAL,
                           kind == FP_SUBNORMAL};
    result |= static_cast<u32>(truths[ins.variant]) << l;
  }
  warp.set_predicate(ins.operands[0], result, mask);
}

bool choose_testp(Statement& statement) {
  const int what = statement.which({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  if (what < 0) return false;
  statement.instruction.variant = static_cast<u8>(what);
  statement.instruction.operands[0] = statement.predicate(statement.operands.at(0));
  statement.source(1, statement.bits());
  statement.instruction.handler = statement.bits() == 32 ? &test_predicate<float> : &test_predicate<double>;
  return true;
}

}  // namespace

bool choose_logic(Statement& statement) {
  const std::string& name = statement.name();
  Handler& handler = statement.instruction.handler;
  const size_t count = statement.operands.size();
  if (statement.type() == "pred") {
    for (size_t n = 0; n < count; ++n) {
      statement.instruction.operands[n] = statement.predicate(statement.operands[n]);
    }
    handler = name == "and"   ? &logic_of_two<And>
              : name == "or"  ? &logic_of_two<Or>
              : name == "xor" ? &logic_of_two<Xor>
                              : &logic_not;
    return true;
  }
  const int bits = statement.bits();
  statement.target(bits);
  statement.sources(1, count, bits);
  handler = name == "and"   ? binary_of_bits<And>(bits)
            : name == "or"  ? binary_of_bits<Or>(bits)
            : name == "xor" ? binary_of_bits<Xor>(bits)
                            : unary_of_bits<Not>(bits);
  return true;
}

bool choose_comparison(Statement& statement) {
  if (statement.name() == "setp") return choose_setp(statement);
  if (statement.name() == "testp") return choose_testp(statement);
  const int bits = statement.bits();
  statement.target(bits);
  statement.sources(1, 3, bits);
  statement.instruction.operands[3] = statement.predicate(statement.operands.at(3));
  statement.instruction.handler = bits == 16 ? &select<u16> : bits == 32 ? &select<u32> : &select<u64>;
  return true;
}

}  // namespace ptx_machine
