#include "decode/text.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace ptx_machine {

void TextReader::skip() {
  while (at < end) {
    if (is_space(text[at])) {
      ++at;
    } else if (text.compare(at, 2, "//") == 0) {
      at = std::min(text.find('\n', at), end);
    } else if (text.compare(at, 2, "/*") == 0) {
      const size_t closed = text.find("*/", at);
      at = closed == std::string::npos ? end : closed + 2;
    } else {
      return;
    }
  }
}

bool TextReader::starts(const char* word) const { return text.compare(at, std::strlen(word), word) == 0; }

std::string TextReader::until(char stop) {
  const size_t begin = at;
  at = std::min(text.find(stop, at), end);
  std::string result = text.substr(begin, at - begin);
  if (at < end) ++at;
  return result;
}

std::string TextReader::word() {
  const size_t begin = at;
  while (at < end && is_word(text[at])) ++at;
  return text.substr(begin, at - begin);
}

void TextReader::skip_braces() {
  int depth = 0;
  for (; at < end; ++at) {
    if (text[at] == '{') ++depth;
    if (text[at] == '}' && --depth == 0) {
      ++at;
      return;
    }
  }
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

std::string trimmed(const std::string& text) {
  size_t begin = 0, end = text.size();
  while (begin < end && is_space(text[begin])) ++begin;
  while (end > begin && is_space(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t n = 0; n <= text.size(); ++n) {
    const char c = n == text.size() ? ',' : text[n];
    if (c == ',' && (depth == 0 || n == text.size())) {
      std::string part = trimmed(text.substr(begin, n - begin));
      if (!part.empty()) parts.push_back(std::move(part));
      begin = n + 1;
    } else if (c == '{' || c == '[' || c == '(') {
      ++depth;
    } else if (c == '}' || c == ']' || c == ')') {
      --depth;
    }
  }
  return parts;
}

u32 round_up(u32 value, u32 multiple) { return (value + multiple - 1) / multiple * multiple; }

bool parse_number(const std::string& text, u64* value) {
  if (text.empty()) return false;
  const char* const digits = text.c_str();
  if (text.size() > 9 && digits[0] == '0' && std::strchr("fFdD", digits[1]) != nullptr) {
    *value = std::strtoull(digits + 2, nullptr, 16);
    return true;
  }
  const bool negative = digits[0] == '-';
  if (!negative && !is_digit(digits[0])) return false;
  char* stop = nullptr;
  *value = negative ? static_cast<u64>(std::strtoll(digits, &stop, 0)) : std::strtoull(digits, &stop, 0);
  return *stop == '\0' || *stop == 'U';
}

u32 bytes_of_type(const std::string& type) {
  return type == "pred" ? 0 : static_cast<u32>(std::atoi(type.c_str() + 1)) / 8;
}

std::vector<Declaration> declarations(const std::string& text) {
  Declaration common;
  common.align = 0;
  std::string rest = trimmed(text);
  while (!rest.empty() && rest[0] == '.') {
    size_t n = 1;
    while (n < rest.size() && is_word(rest[n])) ++n;
    const std::string word = rest.substr(1, n - 1);
    rest = trimmed(rest.substr(n));
    if (word == "align") {
      common.align = static_cast<u32>(std::atoi(rest.c_str()));
      rest = trimmed(rest.substr(std::min(rest.find_first_not_of("0123456789"), rest.size())));
    } else if (word != "ptr" && (is_digit(word.back()) || word == "pred")) {
      common.type = word;
    }
  }
  std::vector<Declaration> result;
  for (const std::string& part : split(rest)) {
    Declaration declaration = common;
    const size_t equals = part.find('=');
    const std::string left = trimmed(part.substr(0, equals));
    if (equals != std::string::npos) declaration.value = trimmed(part.substr(equals + 1));
    declaration.name = left.substr(0, left.find_first_of("[<"));
    const u32 element = bytes_of_type(declaration.type);
    declaration.bytes = element;
    const size_t bracket = left.find('['), angle = left.find('<');
    if (bracket != std::string::npos) {
      declaration.open = left[bracket + 1] == ']';
      declaration.bytes = element * static_cast<u32>(std::atoi(left.c_str() + bracket + 1));
    }
    if (angle != std::string::npos) {
      declaration.range = static_cast<u32>(std::atoi(left.c_str() + angle + 1));
    }
    if (declaration.align == 0) declaration.align = std::max(element, 1u);
    result.push_back(std::move(declaration));
  }
  return result;
}

}  // namespace ptx_machine
