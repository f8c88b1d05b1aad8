// Decodes the text of a kernel to its instructions. Names become offsets of registers, labels become
// positions, functions are written out at each call (there is no recursion).
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/scopes.h"
#include "decode/statement.h"

namespace ptx_machine {

class Decoder {
 public:
  Decoder(Module& module, Kernel& kernel)
      : module_(module), kernel_(kernel), scopes_(module, kernel), builder_(kernel) {}

  void run();

 private:
  // A block of braces: its labels are known in it and in those within it.
  struct Block {
    Block* outer = nullptr;
    std::unordered_map<std::string, u32> labels;
    std::unordered_map<std::string, std::vector<std::string>> targets;  // of brx.idx
  };
  struct Jump {
    u32 from;  // an instruction, or a table of brx.idx
    std::string label;
    const Block* block;  // where it says so
  };
  // A function's body while it is decoded.
  struct Frame {
    bool called = false;
    std::deque<Block> blocks = std::deque<Block>(1);  // which do not move
    Block* block = &blocks.front();
    std::vector<Jump> branches, tables;
    std::vector<u32> returns;
  };
  struct Guard {
    u32 predicate = kNoOperand;
    bool negated = false;
  };

  // Reads parameters, of a kernel or at the places of a call's arguments, and returns where the body begins.
  size_t signature(const Module::Function& function, const std::vector<Place>& arguments);
  void parameter(const Declaration& declared, bool of_kernel, const std::vector<Place>& arguments,
                 size_t& used);
  void body(size_t begin, size_t end, bool called);
  void location(const std::string& text);
  // A label or a list of labels; false where there is none.
  bool label(TextReader& in, Frame& frame);
  void resolve(const Frame& frame);
  void statement(const std::string& text, Frame& frame);
  bool branch(const Statement& statement, const std::string& rest, Frame& frame);
  void call(const std::string& text);
  std::vector<Place> places(const std::string& list) const;
  Guard guard(std::string& text) const;
  Instruction& add(Kind kind);

  // operands.cpp
  Operand operand(const std::string& text);
  Operand address(const std::string& text);
  bool special_register(const std::string& text, Operand* result);
  Operand variable(const std::string& text);

  [[noreturn]] void fail(const std::string& what) const;

  // Which instructions touch registers of products.
  void find_touched();

  Module& module_;
  Kernel& kernel_;
  Scopes scopes_;
  Builder builder_;
  std::unordered_map<std::string, u32> specials_;
  u32 line_ = 1;
  SourceLine source_, inlined_at_;
  int calls_ = 0;  // that are open
  // Instructions with the registers that they name, where a module has products.
  std::vector<std::pair<u32, std::vector<u32>>> named_;
  bool has_products_ = false;
  bool has_most_threads_ = false;
  u32 blocks_of_multiprocessor_ = 1;
};

}  // namespace ptx_machine
