#include "decode/statement.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace ptx_machine {

namespace {

// Registers are aligned for vector instructions of the host.
constexpr size_t kAlignment = 64;

}  // namespace

u32 Builder::constant(u64 value, int bits) {
  const u64 masked = bits == 64 ? value : value & ((1ull << bits) - 1);
  auto& known = known_[bits == 16 ? 0 : bits == 32 ? 1 : 2];
  const auto found = known.find(masked);
  if (found != known.end()) return found->second;
  std::vector<u8>& constants = kernel_.constants;
  constants.resize((constants.size() + kAlignment - 1) / kAlignment * kAlignment);
  const u32 operand = static_cast<u32>(constants.size()) | kMarked;
  const auto* bytes = reinterpret_cast<const u8*>(&masked);
  for (int lane = 0; lane < kLanes; ++lane) constants.insert(constants.end(), bytes, bytes + bits / 8);
  return known[masked] = operand;
}

u32 Builder::new_register(int bits) {
  const u32 at = kernel_.register_bytes;
  kernel_.register_bytes += std::max<u32>(kAlignment, static_cast<u32>(bits) / 8 * kLanes);
  return at;
}

u32 Builder::source(const Operand& operand, int bits) {
  if (operand.kind == Operand::Kind::kImmediate) return constant(operand.value, bits);
  if (operand.kind != Operand::Kind::kRegister) throw std::runtime_error("a register or number is expected");
  if (operand.bits != bits) {
    throw std::runtime_error("a register of " + std::to_string(bits) + " bits is expected, not of " +
                             std::to_string(operand.bits));
  }
  return operand.at;
}

int bits_of_type(const std::string& type) {
  if (type == "pred") return 1;
  if (type == "f16x2" || type == "bf16x2" || type == "tf32") return 32;
  if (type == "bf16") return 16;
  return type.size() > 1 ? std::atoi(type.c_str() + 1) : 0;
}

int Statement::bits() const { return bits_of_type(type()); }

bool Statement::has(const char* word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}

int Statement::which(std::initializer_list<const char*> choices, int otherwise) const {
  const auto found =
      std::find_if(choices.begin(), choices.end(), [this](const char* word) { return has(word); });
  return found == choices.end() ? otherwise : static_cast<int>(found - choices.begin());
}

char Statement::rounding(char otherwise) const {
  for (const char* word : {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"}) {
    if (has(word)) return word[1];
  }
  return otherwise;
}

Space Statement::space() const {
  if (has("global") || has("const")) return Space::kGlobal;
  if (has("shared") || has("shared::cta")) return Space::kShared;
  if (has("local")) return Space::kLocal;
  if (has("param")) return Space::kParameters;
  return Space::kGeneric;
}

void Statement::source(size_t place, int bits) {
  instruction.operands[place] = builder.source(operands.at(place), bits);
}

void Statement::sources(size_t from, size_t to, int bits) {
  for (size_t place = from; place < to; ++place) source(place, bits);
}

void Statement::target(int bits) {
  const Operand& operand = operands.at(0);
  if (operand.kind != Operand::Kind::kRegister || operand.bits != bits) {
    throw std::runtime_error("the result has the wrong size");
  }
  instruction.operands[0] = operand.at;
}

u32 Statement::predicate(const Operand& operand) const {
  if (operand.kind == Operand::Kind::kSink || operand.kind == Operand::Kind::kNone) return kNoOperand;
  if (operand.kind != Operand::Kind::kPredicate) throw std::runtime_error("a predicate is expected");
  return operand.negated ? operand.at | kMarked : operand.at;
}

s64 Statement::address(const Operand& operand, int place) {
  if (operand.kind != Operand::Kind::kAddress) throw std::runtime_error("an address is expected");
  instruction.operands[place] = operand.list.empty() ? kNoOperand : operand.list[0].at;
  if (!operand.list.empty() && place == 0) instruction.wide = operand.list[0].bits == 64;
  return static_cast<s64>(operand.value);
}

}  // namespace ptx_machine
