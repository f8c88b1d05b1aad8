// What the decoder hands to instructions/: one statement, whose names are registers and places by now.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "decode/kernel.h"

namespace ptx_machine {

struct Operand {
  enum class Kind : u8 { kNone, kRegister, kPredicate, kImmediate, kAddress, kList, kSink };
  Kind kind = Kind::kNone;
  u8 bits = 0;           // of a register: 16, 32, 64
  bool negated = false;  // of a predicate
  bool symbol = false;   // an immediate or an address comes from the name of a variable, which is in `space`
  Space space = Space::kGeneric;
  u32 at = kNoOperand;        // of a register: its offset; of a predicate: its number
  u64 value = 0;              // of an immediate; what is added to an address
  std::vector<Operand> list;  // of a vector, or of "a|b"; of an address: its register, if it has one
};

// Makes what a kernel needs beside the registers it declares.
class Builder {
 public:
  explicit Builder(Kernel& kernel) : kernel_(kernel) {}

  // A number for all lanes, as an operand.
  u32 constant(u64 value, int bits);
  u32 new_register(int bits);
  u32 new_predicate() { return kernel_.predicates++; }
  // Its number.
  u32 add(Product product) {
    kernel_.products.push_back(std::move(product));
    return static_cast<u32>(kernel_.products.size() - 1);
  }
  // A register or a number of so many bits.
  u32 source(const Operand& operand, int bits);

 private:
  Kernel& kernel_;
  std::unordered_map<u64, u32> known_[3];  // of 16, 32, 64 bits
};

struct Statement {
  std::vector<std::string> words;  // "add.rn.f32" as "add", "rn", "f32"
  std::vector<Operand> operands;
  Instruction& instruction;
  Builder& builder;

  const std::string& name() const { return words[0]; }
  const std::string& type() const { return words.back(); }
  int bits() const;  // of the type
  bool has(const char* word) const;
  // The place of the one word of `choices` that the statement has, else `otherwise`.
  int which(std::initializer_list<const char*> choices, int otherwise = -1) const;
  // 'n', 'z', 'm', 'p' of .rn, .rni and so on.
  char rounding(char otherwise) const;
  Space space() const;

  // The operand of that place becomes the instruction's of the same place.
  void source(size_t place, int bits);
  void sources(size_t from, size_t to, int bits);
  void target(int bits);
  u32 predicate(const Operand& operand) const;
  // The register of an address becomes operand `place`; returns what is added to it.
  s64 address(const Operand& operand, int place);
};

int bits_of_type(const std::string& type);

// Gives the statement's instruction a handler and operands; false for one that is not known. Throws
// std::runtime_error where operands do not fit.
bool choose(Statement& statement);

}  // namespace ptx_machine
