// Reads what a PTX text declares: files, functions, variables.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "decode/kernel.h"
#include "decode/text.h"

namespace ptx_machine {

namespace {

// Writes values like `{1, {2, 3}}` or `4` as the bytes of consecutive elements.
void write_values(const std::string& values, u32 element, u8*& at, const u8* end) {
  if (!values.empty() && values[0] == '{') {
    for (const std::string& part : split(values.substr(1, values.size() - 2))) {
      write_values(part, element, at, end);
    }
    return;
  }
  u64 value = 0;
  if (!parse_number(values, &value)) throw std::runtime_error("ptx machine: a variable begins as " + values);
  if (at + element > end) throw std::runtime_error("ptx machine: a variable begins with too many values");
  std::memcpy(at, &value, element);
  at += element;
}

void add_variables(Module& module, const std::string& head) {
  const bool shared = head.find(".shared") != std::string::npos;
  for (const Declaration& declared : declarations(head)) {
    u64 address = 0;
    if (!shared) {
      // Constant memory has addresses like those of device memory, and nothing writes it.
      void* memory = allocate(std::max(declared.bytes, 1u), MemoryKind::kDevice);
      if (memory == nullptr) throw std::runtime_error("ptx machine: no memory for " + declared.name);
      std::memset(memory, 0, declared.bytes);
      auto* at = static_cast<u8*>(memory);
      if (!declared.value.empty()) {
        write_values(declared.value, bytes_of_type(declared.type), at, at + declared.bytes);
      }
      address = reinterpret_cast<u64>(memory);
    }
    const Space space = shared ? Space::kShared : Space::kGlobal;
    module.variables[declared.name] = {space, address, declared.bytes, declared.align, declared.open};
  }
}

// Returns the name in ".visible .func (.param .b32 result) name(...)", reading from after the keyword.
std::string name_of_function(TextReader in) {
  in.skip();
  if (in.text[in.at] == '(') {
    in.until(')');
    in.skip();
  }
  return in.word();
}

}  // namespace

std::string Module::line(u32 number) const {
  if (number == 0 || number > line_starts.size()) return "";
  const size_t begin = line_starts[number - 1];
  return trimmed(text.substr(begin, text.find('\n', begin) - begin));
}

std::string Module::source_of(const Instruction& instruction) const {
  const auto text_of = [this](SourceLine place) {
    const auto file = files.find(place.file);
    return file == files.end() ? "" : file->second + ":" + std::to_string(place.line);
  };
  const std::string source = text_of(instruction.source), outer = text_of(instruction.inlined_at);
  return outer.empty() ? source : source + " in " + outer;
}

u32 Module::line_at(size_t position) const {
  const auto after = std::upper_bound(line_starts.begin(), line_starts.end(), position);
  return static_cast<u32>(after - line_starts.begin());
}

std::unique_ptr<Module> read_module(std::string given) {
  auto module = std::make_unique<Module>();
  module->text = std::move(given);
  const std::string& text = module->text;
  module->line_starts.push_back(0);
  for (size_t n = text.find('\n'); n != std::string::npos; n = text.find('\n', n + 1)) {
    module->line_starts.push_back(n + 1);
  }
  TextReader in{text, 0, text.size()};
  while (!in.done()) {
    if (in.starts(".file")) {
      const std::string line = in.until('\n');
      const size_t quote = line.find('"');
      if (quote == std::string::npos) continue;
      const auto number = static_cast<u32>(std::atoi(line.c_str() + std::strlen(".file")));
      module->files[number] = line.substr(quote + 1, line.rfind('"') - quote - 1);
      continue;
    }
    if (in.starts(".section")) {
      in.skip_braces();
      continue;
    }
    if (in.starts(".version") || in.starts(".target") || in.starts(".address_size")) {
      in.until('\n');
      continue;
    }
    // A function goes up to its body or the end of its prototype, a variable up to its semicolon.
    const size_t begin = in.at, brace = text.find('{', begin), semicolon = text.find(';', begin);
    if (semicolon == std::string::npos) break;
    const std::string head = text.substr(begin, std::min(brace, semicolon) - begin);
    const bool is_kernel = head.find(".entry") != std::string::npos;
    const size_t keyword = head.find(is_kernel ? ".entry" : ".func");
    if (keyword == std::string::npos) {
      in.at = semicolon + 1;
      add_variables(*module, trimmed(text.substr(begin, semicolon - begin)));
      continue;
    }
    const size_t behind = begin + keyword + std::strlen(is_kernel ? ".entry" : ".func");
    const std::string name = name_of_function({text, behind, text.size()});
    if (brace < semicolon) {
      in.at = brace;
      in.skip_braces();
      module->functions[name] = {begin, in.at, is_kernel};
    } else {
      in.at = semicolon + 1;
    }
  }
  return module;
}

}  // namespace ptx_machine
