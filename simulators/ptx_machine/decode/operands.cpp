// Decodes operands of statements: registers, numbers, addresses, lists, names of variables.
#include <cstdlib>

#include "decode/decoder.h"
#include "decode/special_registers.h"

namespace ptx_machine {

// Reads "[register + 4]", or with coordinates "[register, {a, b}]", which become a list after the register.
Operand Decoder::address(const std::string& text) {
  const std::vector<std::string> parts = split(text.substr(1, text.size() - 2));
  if (parts.empty()) fail("the address " + text);
  const std::string& inside = parts[0];
  const size_t plus = inside.find('+');
  Operand result;
  result.kind = Operand::Kind::kAddress;
  if (plus != std::string::npos && !parse_number(trimmed(inside.substr(plus + 1)), &result.value)) {
    fail("the address " + text);
  }
  const Operand base = operand(trimmed(inside.substr(0, plus)));
  if (base.kind == Operand::Kind::kRegister) {
    result.list.push_back(base);
    if (parts.size() > 1) result.list.push_back(operand(parts[1]));
  } else if (base.kind == Operand::Kind::kImmediate) {
    result.value += base.value;
    result.symbol = base.symbol;
    result.space = base.space;
    if (parts.size() > 1) fail("coordinates after a name in " + text);
  } else {
    fail("the address " + text);
  }
  return result;
}

bool Decoder::special_register(const std::string& text, Operand* result) {
  for (int n = 0; n < kSpecialRegisterCount; ++n) {
    if (text != kSpecialRegisters[n]) continue;
    const auto [place, is_new] = specials_.emplace(text, 0);
    if (is_new) {
      place->second = builder_.new_register(32);
      kernel_.specials.push_back({static_cast<u8>(n), place->second});
    }
    result->kind = Operand::Kind::kRegister;
    result->bits = 32;
    result->at = place->second;
    return true;
  }
  return false;
}

Operand Decoder::variable(const std::string& text) {
  const size_t plus = text.find('+');
  const Place* place = scopes_.find_place(trimmed(text.substr(0, plus)));
  if (place == nullptr) fail("the name " + text);
  Operand result;
  result.kind = Operand::Kind::kImmediate;
  result.symbol = true;
  result.space = place->space;
  result.value = place->address;
  if (plus != std::string::npos) result.value += std::strtoull(text.c_str() + plus + 1, nullptr, 0);
  return result;
}

Operand Decoder::operand(const std::string& text) {
  Operand result;
  if (text.empty()) fail("an empty operand");
  if (text == "_") {
    result.kind = Operand::Kind::kSink;
    return result;
  }
  if (text[0] == '{') {
    result.kind = Operand::Kind::kList;
    for (const auto& part : split(text.substr(1, text.size() - 2))) result.list.push_back(operand(part));
    return result;
  }
  if (text[0] == '[') return address(text);
  const size_t bar = text.find('|');
  if (bar != std::string::npos) {
    result.kind = Operand::Kind::kList;
    result.list = {operand(trimmed(text.substr(0, bar))), operand(trimmed(text.substr(bar + 1)))};
    return result;
  }
  if (text[0] == '!') {
    result = operand(trimmed(text.substr(1)));
    result.negated = !result.negated;
    return result;
  }
  result.kind = Operand::Kind::kImmediate;
  if (parse_number(text, &result.value)) return result;
  if (text == "WARP_SZ") {
    result.value = kLanes;
    return result;
  }
  Register found;
  if (scopes_.find_register(text, &found)) {
    result.kind = found.bits == 1 ? Operand::Kind::kPredicate : Operand::Kind::kRegister;
    result.bits = found.bits;
    result.at = found.at;
    return result;
  }
  return special_register(text, &result) ? result : variable(text);
}

}  // namespace ptx_machine
