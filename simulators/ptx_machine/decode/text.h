// Reading PTX: statements of a text, lists, declarations.
#pragma once

#include <cctype>
#include <string>
#include <vector>

#include "types.h"

namespace ptx_machine {

inline bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
inline bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
// Returns whether a character belongs to a name; an opcode has dots and colons as well.
inline bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}
inline bool is_opcode(char c) { return is_word(c) || c == '.' || c == ':'; }

struct TextReader {
  const std::string& text;
  size_t at, end;

  // Skips spaces and comments.
  void skip();
  bool done() {
    skip();
    return at >= end;
  }
  bool starts(const char* word) const;
  // Returns the text before `stop`, and goes past `stop`.
  std::string until(char stop);
  // Returns the word that begins here, and goes past it.
  std::string word();
  // Goes past the brace that closes the one here.
  void skip_braces();
};

// Returns a name as C++ has it.
std::string demangled(const std::string& name);
std::string trimmed(const std::string& text);
// Splits a text at commas outside of brackets.
std::vector<std::string> split(const std::string& text);
u32 round_up(u32 value, u32 multiple);
// Reads a number of PTX, which gives floating-point numbers by their bits.
bool parse_number(const std::string& text, u64* value);

// Holds ".param .align 8 .b8 name[736]" or ".reg .b32 %r<100>".
struct Declaration {
  std::string type, name;
  u32 align = 1;
  u32 bytes = 0;      // 0 for a predicate
  u32 range = 0;      // the 100 of "%r<100>"
  bool open = false;  // whether it is "name[]"
  std::string value;  // the text after "="
};
u32 bytes_of_type(const std::string& type);
std::vector<Declaration> declarations(const std::string& text);

}  // namespace ptx_machine
