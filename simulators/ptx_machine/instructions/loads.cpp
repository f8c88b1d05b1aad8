// Executes ld and st. operands: the address, the registers of the vector; variant: the space.
#include <algorithm>

#include "instructions/access.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

constexpr int kMostElements = 4;

MemoryAccess access_of(const Instruction& ins, u32 element, Access access) {
  MemoryAccess result;
  result.wide = ins.wide;
  result.space = static_cast<Space>(ins.variant);
  result.bytes = element * ins.count;
  result.access = access;
  result.added = ins.immediate;
  return result;
}

template <class Element, class Register>
void load(Warp& warp, const Instruction& ins, u32 mask) {
  u8* pointers[kLanes];
  resolve(warp, ins, mask, access_of(ins, sizeof(Element), Access::kRead), pointers);
  for (int n = 0; n < ins.count; ++n) {
    if (ins.operands[1 + n] == kNoOperand) continue;
    auto* const registers = warp.target<Register>(ins, 1 + n);
    const auto load_lane = [&](int l) {
      Element element;
      std::memcpy(&element, pointers[l] + sizeof(Element) * static_cast<size_t>(n), sizeof(element));
      registers[l] = static_cast<Register>(element);
    };
    if (mask == kWholeWarp) {
      for (int l = 0; l < kLanes; ++l) load_lane(l);
    } else {
      for (u32 rest = mask; rest != 0; rest &= rest - 1) load_lane(first_lane(rest));
    }
  }
}

template <class Element, class Register>
void store(Warp& warp, const Instruction& ins, u32 mask) {
  u8* pointers[kLanes];
  resolve(warp, ins, mask, access_of(ins, sizeof(Element), Access::kWrite), pointers);
  for (int n = 0; n < ins.count; ++n) {
    const auto* const registers = warp.source<Register>(ins, 1 + n);
    const auto store_lane = [&](int l) {
      const auto element = static_cast<Element>(registers[l]);
      std::memcpy(pointers[l] + sizeof(Element) * static_cast<size_t>(n), &element, sizeof(element));
    };
    if (mask == kWholeWarp) {
      for (int l = 0; l < kLanes; ++l) store_lane(l);
    } else {
      for (u32 rest = mask; rest != 0; rest &= rest - 1) store_lane(first_lane(rest));
    }
  }
}

template <class Element>
Handler with_registers(bool loads, int bits) {
  if (loads) return bits == 16 ? &load<Element, u16> : bits == 32 ? &load<Element, u32> : &load<Element, u64>;
  return bits == 16 ? &store<Element, u16> : bits == 32 ? &store<Element, u32> : &store<Element, u64>;
}

Handler handler_of(bool loads, const std::string& type, int register_bits) {
  const bool extends_sign = loads && type[0] == 's';
  switch (bits_of_type(type)) {
    case 8:
      return extends_sign ? with_registers<s8>(loads, register_bits)
                          : with_registers<u8>(loads, register_bits);
    case 16:
      return extends_sign ? with_registers<s16>(loads, register_bits)
                          : with_registers<u16>(loads, register_bits);
    case 32:
      return extends_sign ? with_registers<s32>(loads, register_bits)
                          : with_registers<u32>(loads, register_bits);
    case 64:
      return with_registers<u64>(loads, register_bits);
    default:
      return nullptr;
  }
}

}  // namespace

bool choose_load(Statement& statement) {
  Instruction& ins = statement.instruction;
  const bool loads = statement.name() != "st";
  const Operand &where = statement.operands.at(loads ? 1 : 0), &what = statement.operands.at(loads ? 0 : 1);
  ins.immediate = statement.address(where, 0);
  // The variable's space decides, because parameters of called functions are local memory.
  const Space space = where.symbol ? where.space : statement.space();
  if (!loads && space == Space::kParameters) return false;
  ins.variant = static_cast<u8>(space);
  const std::vector<Operand> parts =
      what.kind == Operand::Kind::kList ? what.list : std::vector<Operand>{what};
  if (parts.size() > kMostElements) return false;
  ins.count = static_cast<u8>(parts.size());
  int bits = 0;
  for (const Operand& part : parts) {
    if (part.kind == Operand::Kind::kRegister) bits = part.bits;
  }
  if (bits == 0) bits = std::max(statement.bits(), 16);  // all operands are numbers
  for (size_t n = 0; n < parts.size(); ++n) {
    const bool unused = parts[n].kind == Operand::Kind::kSink;
    ins.operands[1 + n] = unused ? kNoOperand : statement.builder.source(parts[n], bits);
  }
  ins.handler = handler_of(loads, statement.type(), bits);
  return ins.handler != nullptr;
}

}  // namespace ptx_machine
