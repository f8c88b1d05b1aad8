// One statement for instructions/, with names that the decoder has resolved to registers and places.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "decode/kernel.h"

namespace ptx_machine {

struct Operand {
  enum class Kind : u8 { kNone, kRegister, kPredicate, kImmediate, kAddress, kList, kSink };
  Kind kind = Kind::kNone;
  u8 bits = 0;           // bits of a register: 16, 32, 64
  bool negated = false;  // whether a predicate is negated
  bool symbol = false;   // whether it comes from the name of a variable, which is in `space`
  Space space = Space::kGeneric;
  u32 at = kNoOperand;        // the offset of a register, or the number of a predicate
  u64 value = 0;              // an immediate's value, or what is added to an address
  std::vector<Operand> list;  // parts of a vector or of "a|b", or an address's register
};

// Makes what a kernel needs besides the registers that it declares.
class Builder {
 public:
  explicit Builder(Kernel& kernel) : kernel_(kernel) {}

  // Makes an operand that is a number for all lanes.
  u32 constant(u64 value, int bits);
  u32 new_register(int bits);
  u32 new_predicate() { return kernel_.predicates++; }
  // Returns the product's number.
  u32 add(Product product) {
    kernel_.products.push_back(std::move(product));
    return static_cast<u32>(kernel_.products.size() - 1);
  }
  // Returns a register, or a number of so many bits.
  u32 source(const Operand& operand, int bits);

 private:
  Kernel& kernel_;
  std::unordered_map<u64, u32> known_[3];  // constants of 16, 32, 64 bits
};

struct Statement {
  std::vector<std::string> words;  // "add.rn.f32" as "add", "rn", "f32"
  std::vector<Operand> operands;
  Instruction& instruction;
  Builder& builder;

  const std::string& name() const { return words[0]; }
  const std::string& type() const { return words.back(); }
  int bits() const;  // bits of the type
  bool has(const char* word) const;
  // Returns the place of the one word of `choices` that the statement has, or `otherwise`.
  int which(std::initializer_list<const char*> choices, int otherwise = -1) const;
  // Returns 'n', 'z', 'm' or 'p' for .rn, .rni and so on.
  char rounding(char otherwise) const;
  Space space() const;

  // The statement's operand of that place becomes the instruction's operand of the same place.
  void source(size_t place, int bits);
  void sources(size_t from, size_t to, int bits);
  void target(int bits);
  u32 predicate(const Operand& operand) const;
  // The register of an address becomes operand `place`; returns what is added to the register.
  s64 address(const Operand& operand, int place);
};

int bits_of_type(const std::string& type);

// Gives the statement's instruction a handler and operands; returns false if it is not known. Throws
// std::runtime_error if operands do not fit.
bool choose(Statement& statement);

}  // namespace ptx_machine
