// Reading PTX: statements of a text, lists, declarations.
#pragma once

#include <cctype>
#include <string>
#include <vector>

#include "types.h"

namespace ptx_machine {

inline bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
inline bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
// Of a name; an opcode has dots and colons as well.
inline bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}
inline bool is_opcode(char c) { return is_word(c) || c == '.' || c == ':'; }

struct TextReader {
  const std::string& text;
  size_t at, end;

  // Past spaces and comments.
  void skip();
  bool done() {
    skip();
    return at >= end;
  }
  bool starts(const char* word) const;
  // What stands before `stop`, and past it.
  std::string until(char stop);
  // The word that begins here, and past it.
  std::string word();
  // Past the brace that closes the one here.
  void skip_braces();
};

// A name as C++ has it.
std::string demangled(const std::string& name);
std::string trimmed(const std::string& text);
// At commas outside of brackets.
std::vector<std::string> split(const std::string& text);
u32 round_up(u32 value, u32 multiple);
// A number of PTX, whose floating-point numbers are given by their bits.
bool parse_number(const std::string& text, u64* value);

// ".param .align 8 .b8 name[736]", ".reg .b32 %r<100>"
struct Declaration {
  std::string type, name;
  u32 align = 1;
  u32 bytes = 0;      // 0 for a predicate
  u32 range = 0;      // of "%r<100>"
  bool open = false;  // "name[]"
  std::string value;  // behind "="
};
u32 bytes_of_type(const std::string& type);
std::vector<Declaration> declarations(const std::string& text);

}  // namespace ptx_machine
