// The kernels that programs register, and the PTX that their binaries carry.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/kernel.h"

namespace ptx_machine {

// What nvcc puts into a program for each source.
struct FatBinary {
  const u8* data = nullptr;
  bool is_read = false;
  std::vector<std::unique_ptr<Module>> modules;
};

struct Function {
  FatBinary* binary = nullptr;
  std::string name;
  Kernel* kernel = nullptr;  // null if there is no PTX that can be read
  bool looked_for = false;
};

// Finds a function by the host's address of the kernel; null for an address that was not registered. PTX that
// cannot be read is reported once.
Function* find_function(const void* host);
// Returns whether a text is for this device or an earlier one.
bool device_runs(const std::string& text);
const std::unordered_map<const void*, Function>& all_functions();
void add_function(const void* host, const Function& function);

}  // namespace ptx_machine
