#include "decode/scopes.h"

#include <algorithm>
#include <cstdlib>

namespace ptx_machine {

namespace {

constexpr u32 kAlignment = 64;
constexpr u32 kAlignmentOfShared = 16;
constexpr u32 kAlignmentOfLocal = 16;

// Returns the kernel and the functions that it may call.
std::vector<Module::Function> functions_of(const Module& module, const std::string& kernel) {
  std::vector<Module::Function> functions;
  for (const auto& [name, function] : module.functions) {
    if (!function.is_kernel || name == kernel) functions.push_back(function);
  }
  return functions;
}

bool is_named(const Module& module, const Module::Function& function, const std::string& variable) {
  return module.text.find(variable, function.begin) < function.end;
}

// Finds declarations like ".shared .align 4 .b8 name[128];" in the body of a function.
std::vector<Declaration> shared_declarations(const Module& module, const Module::Function& function) {
  const std::string word = ".shared";
  std::vector<Declaration> result;
  for (size_t at = module.text.find(word, function.begin); at < function.end;
       at = module.text.find(word, at + 1)) {
    if (!is_space(module.text[at - 1])) continue;  // it belongs to an instruction
    const size_t end = module.text.find(';', at);
    for (Declaration& declared : declarations(module.text.substr(at, end - at)))
      result.push_back(std::move(declared));
  }
  return result;
}

}  // namespace

Scopes::Scopes(const Module& module, Kernel& kernel) : kernel_(kernel) {
  open();
  place_shared_variables(module);
  for (const auto& [name, variable] : module.variables) {
    if (variable.space == Space::kGlobal) add(name, {Space::kGlobal, variable.address});
  }
}

// Dynamic shared memory comes after all static memory.
void Scopes::place_shared_variables(const Module& module) {
  u32 end = 0, align = kAlignmentOfShared;
  const auto place = [&](const std::string& name, u32 bytes, u32 alignment) {
    end = round_up(end, alignment);
    add(name, {Space::kShared, kSharedBase + end});
    end += bytes;
  };
  const std::vector<Module::Function> functions = functions_of(module, kernel_.name);
  for (const auto& [name, variable] : module.variables) {
    if (variable.space != Space::kShared) continue;
    if (variable.open) {
      align = std::max(align, variable.align);
    } else if (std::any_of(functions.begin(), functions.end(), [&, &name = name](const auto& function) {
                 return is_named(module, function, name);
               })) {
      place(name, variable.bytes, variable.align);
    }
  }
  for (const Module::Function& function : functions) {
    for (const Declaration& declared : shared_declarations(module, function)) {
      place(declared.name, declared.bytes, declared.align);
    }
  }
  kernel_.static_shared = round_up(end, align);
  for (const auto& [name, variable] : module.variables) {
    if (variable.space == Space::kShared && variable.open) {
      add(name, {Space::kShared, kSharedBase + kernel_.static_shared});
    }
  }
}

void Scopes::declare_registers(const Declaration& declared) {
  const u8 bits = declared.type == "pred" ? 1
                  : declared.bytes == 1   ? 16
                                          : static_cast<u8>(declared.bytes * 8);
  const u32 count = std::max(declared.range, 1u);
  Register first{bits, kernel_.predicates};
  if (bits == 1) {
    kernel_.predicates += count;
  } else {
    first.at = kernel_.register_bytes = round_up(kernel_.register_bytes, kAlignment);
    kernel_.register_bytes += count * bits / 8 * kLanes;
  }
  if (declared.range != 0) {
    scopes_.back().families[declared.name] = {first, count};
  } else {
    scopes_.back().registers[declared.name] = first;
  }
}

bool Scopes::declare(const std::string& kind, const std::string& rest) {
  if (kind == ".shared") return true;  // it has its place already
  if (kind != ".reg" && kind != ".param" && kind != ".local") return false;
  for (const Declaration& declared : declarations(rest)) {
    if (kind == ".reg") {
      declare_registers(declared);
      continue;
    }
    // Arguments of called functions are in the thread's memory, too.
    kernel_.local_bytes = round_up(kernel_.local_bytes, std::max(declared.align, kAlignmentOfLocal));
    add(declared.name, {Space::kLocal, kernel_.local_bytes});
    kernel_.local_bytes += declared.bytes;
  }
  return true;
}

bool Scopes::find_register(const std::string& name, Register* found) const {
  size_t digits = name.size();
  while (digits > 0 && is_digit(name[digits - 1])) --digits;
  const bool numbered = digits < name.size();
  const std::string family = name.substr(0, digits);
  const u32 number = numbered ? static_cast<u32>(std::atoi(name.c_str() + digits)) : 0;
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto exact = scope->registers.find(name);
    if (exact != scope->registers.end()) {
      *found = exact->second;
      return true;
    }
    const auto member = numbered ? scope->families.find(family) : scope->families.end();
    if (member == scope->families.end() || number >= member->second.count) continue;
    *found = member->second.first;
    found->at += number * (found->bits == 1 ? 1 : found->bits / 8 * kLanes);
    return true;
  }
  return false;
}

const Place* Scopes::find_place(const std::string& name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->places.find(name);
    if (found != scope->places.end()) return &found->second;
  }
  return nullptr;
}

}  // namespace ptx_machine
