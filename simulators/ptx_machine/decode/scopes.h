// The names that are known at a place of the PTX: registers and variables, by blocks of braces.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "decode/kernel.h"
#include "decode/text.h"

namespace ptx_machine {

struct Register {
  u8 bits = 0;  // 1 for a predicate
  u32 at = 0;   // the offset, or the number of a predicate
};

struct Place {
  Space space;
  u64 address;
};

class Scopes {
 public:
  // Adds the module's variables; shared ones get their places in the kernel's memory.
  Scopes(const Module& module, Kernel& kernel);

  void open() { scopes_.emplace_back(); }
  void close() { scopes_.pop_back(); }
  void close_to(size_t depth) { scopes_.resize(depth); }
  size_t depth() const { return scopes_.size(); }

  // Handles ".reg", ".local", ".param" and ".shared" of a body; returns false for other kinds.
  bool declare(const std::string& kind, const std::string& rest);
  void add(const std::string& name, Place place) { scopes_.back().places[name] = place; }

  bool find_register(const std::string& name, Register* found) const;
  const Place* find_place(const std::string& name) const;

 private:
  struct Family {
    Register first;
    u32 count;
  };
  struct Scope {
    std::unordered_map<std::string, Register> registers;
    std::unordered_map<std::string, Family> families;  // "%r<100>" under the name "%r"
    std::unordered_map<std::string, Place> places;
  };

  void place_shared_variables(const Module& module);
  void declare_registers(const Declaration& declared);

  Kernel& kernel_;
  std::vector<Scope> scopes_;
};

}  // namespace ptx_machine
