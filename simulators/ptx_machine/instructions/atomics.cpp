// Executes atom and red. operands: the address, the result or none, b, c; variant: the space; count: the
// operation.
#include <algorithm>
#include <type_traits>

#include "instructions/access.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

enum class Operation : u8 { kAdd, kMinimum, kMaximum, kExchange, kCompareAndSwap, kAnd, kOr, kXor };

template <class T>
T combined(Operation operation, T old, T b, T c) {
  switch (operation) {
    case Operation::kAdd:
      return static_cast<T>(old + b);
    case Operation::kMinimum:
      return std::min(old, b);
    case Operation::kMaximum:
      return std::max(old, b);
    case Operation::kExchange:
      return b;
    case Operation::kCompareAndSwap:
      return old == b ? c : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    return operation == Operation::kAnd ? old & b : operation == Operation::kOr ? old | b : old ^ b;
  }
  return old;
}

template <class T>
void atomic(Warp& warp, const Instruction& ins, u32 mask) {
  MemoryAccess access;
  access.wide = ins.wide;
  access.space = static_cast<Space>(ins.variant);
  access.bytes = sizeof(T);
  access.access = Access::kAtomic;
  access.added = ins.immediate;
  u8* pointers[kLanes];
  resolve(warp, ins, mask, access, pointers);
  const T* b = warp.source<T>(ins, 2);
  const T* c = ins.operands[3] == kNoOperand ? b : warp.source<T>(ins, 3);
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    T old;
    std::memcpy(&old, pointers[l], sizeof(old));
    const T value = combined(static_cast<Operation>(ins.count), old, b[l], c[l]);
    std::memcpy(pointers[l], &value, sizeof(value));
    if (ins.operands[1] != kNoOperand) warp.target<T>(ins, 1)[l] = old;
  }
}

Handler handler_of(const std::string& type) {
  if (type == "f32") return &atomic<float>;
  if (type == "f64") return &atomic<double>;
  if (type == "s32") return &atomic<s32>;
  if (type == "s64") return &atomic<s64>;
  if (type == "u32" || type == "b32") return &atomic<u32>;
  return type == "u64" || type == "b64" ? &atomic<u64> : nullptr;
}

}  // namespace

bool choose_atomic(Statement& statement) {
  Instruction& ins = statement.instruction;
  const int operation = statement.which({"add", "min", "max", "exch", "cas", "and", "or", "xor"});
  if (operation < 0) return false;
  const bool returns = statement.name() == "atom";
  const size_t at = returns ? 1 : 0;
  const Operand& where = statement.operands.at(at);
  ins.immediate = statement.address(where, 0);
  ins.variant = static_cast<u8>(where.symbol ? where.space : statement.space());
  ins.count = static_cast<u8>(operation);
  const bool unused = !returns || statement.operands[0].kind == Operand::Kind::kSink;
  ins.operands[1] = unused ? kNoOperand : statement.operands[0].at;
  ins.operands[2] = statement.builder.source(statement.operands.at(at + 1), statement.bits());
  if (static_cast<Operation>(operation) == Operation::kCompareAndSwap) {
    ins.operands[3] = statement.builder.source(statement.operands.at(at + 2), statement.bits());
  }
  ins.handler = handler_of(statement.type());
  return ins.handler != nullptr;
}

}  // namespace ptx_machine
