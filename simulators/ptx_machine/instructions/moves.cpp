// Executes mov, also of vectors, and cvta.
#include "instructions/choosers.h"
#include "instructions/lanes.h"

namespace ptx_machine {

namespace {

template <class T>
struct Same {
  static T f(T a) { return a; }
};

void set_constant(Warp& warp, const Instruction& ins, u32 mask) {
  warp.set_predicate(ins.operands[0], ins.immediate != 0 ? kWholeWarp : 0, mask);
}
void copy_predicate(Warp& warp, const Instruction& ins, u32 mask) {
  warp.set_predicate(ins.operands[0], warp.predicate(ins.operands[1]), mask);
}

// `count` parts of `variant` bits make a whole, the first one in the low bits.
template <class Part, class Whole>
void pack(Warp& warp, const Instruction& ins, u32 mask) {
  Whole* d = warp.target<Whole>(ins, 0);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    Whole whole = 0;
    for (int n = 0; n < ins.count; ++n) {
      whole |= static_cast<Whole>(warp.source<Part>(ins, 1 + n)[l]) << (8 * sizeof(Part) * n);
    }
    d[l] = whole;
  }
}
template <class Part, class Whole>
void unpack(Warp& warp, const Instruction& ins, u32 mask) {
  const Whole* a = warp.source<Whole>(ins, 0);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    const Whole whole = a[l];  // a part may be the same register
    for (int n = 0; n < ins.count; ++n) {
      if (ins.operands[1 + n] == kNoOperand) continue;
      warp.target<Part>(ins, 1 + n)[l] = static_cast<Part>(whole >> (8 * sizeof(Part) * n));
    }
  }
}

// Converts an address of a space to a generic one, or back.
template <class To, class From>
void add_constant(Warp& warp, const Instruction& ins, u32 mask) {
  To* d = warp.target<To>(ins, 0);
  const From* a = warp.source<From>(ins, 1);
  for (int l = 0; l < kLanes; ++l) {
    if (on(mask, l)) d[l] = static_cast<To>(static_cast<u64>(a[l]) + static_cast<u64>(ins.immediate));
  }
}

bool convert_address(Statement& statement) {
  Instruction& ins = statement.instruction;
  const Space space = statement.space();
  const u64 base = space == Space::kShared       ? kSharedWindow
                   : space == Space::kLocal      ? kLocalWindow
                   : space == Space::kParameters ? kParameterWindow
                                                 : 0;
  ins.immediate = statement.has("to") ? -static_cast<s64>(base) : static_cast<s64>(base);
  const int bits = statement.bits();
  statement.target(bits);
  statement.source(1, bits);
  ins.handler = bits == 64 ? &add_constant<u64, u64> : &add_constant<u32, u32>;
  return true;
}

bool move_predicate(Statement& statement) {
  Instruction& ins = statement.instruction;
  const Operand& from = statement.operands.at(1);
  ins.operands[0] = statement.predicate(statement.operands[0]);
  if (from.kind == Operand::Kind::kImmediate) {
    ins.immediate = static_cast<s64>(from.value);
    ins.handler = &set_constant;
  } else {
    ins.operands[1] = statement.predicate(from);
    ins.handler = &copy_predicate;
  }
  return true;
}

bool move_vector(Statement& statement, bool to_list) {
  Instruction& ins = statement.instruction;
  const auto& parts = statement.operands[to_list ? 0 : 1].list;
  const int bits = statement.bits();
  const auto part_bits = bits / static_cast<int>(parts.size());
  if (part_bits < 16 || bits > 64) return false;
  ins.count = static_cast<u8>(parts.size());
  for (size_t n = 0; n < parts.size(); ++n) {
    const bool unused = parts[n].kind == Operand::Kind::kSink;
    ins.operands[1 + n] = unused ? kNoOperand : statement.builder.source(parts[n], part_bits);
  }
  ins.operands[0] = statement.builder.source(statement.operands[to_list ? 1 : 0], bits);
  if (part_bits == 32) {
    ins.handler = to_list ? &unpack<u32, u64> : &pack<u32, u64>;
  } else if (bits == 32) {
    ins.handler = to_list ? &unpack<u16, u32> : &pack<u16, u32>;
  } else {
    ins.handler = to_list ? &unpack<u16, u64> : &pack<u16, u64>;
  }
  return true;
}

}  // namespace

bool choose_move(Statement& statement) {
  if (statement.name() == "cvta") return convert_address(statement);
  if (statement.type() == "pred") return move_predicate(statement);
  const bool to_list = statement.operands.at(0).kind == Operand::Kind::kList;
  const bool from_list = statement.operands.at(1).kind == Operand::Kind::kList;
  if (to_list || from_list) return move_vector(statement, to_list);
  const int bits = statement.bits();
  statement.target(bits);
  statement.source(1, bits);
  statement.instruction.handler = unary_of_bits<Same>(bits);
  return true;
}

}  // namespace ptx_machine
