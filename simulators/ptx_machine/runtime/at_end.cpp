// Prints what the machine has counted when the process ends.
#include <cstdio>
#include <set>

#include "execute/banks.h"
#include "options.h"
#include "memory.h"
#include "runtime/binaries.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

void print_profile() {
  u64 total = 0;
  for (const auto& [host, function] : all_functions()) {
    if (function.kernel == nullptr || function.kernel->launches == 0) continue;
    u64 executed = 0, reached = 0;
    for (const Instruction& instruction : function.kernel->code) {
      executed += instruction.executed;
      reached += instruction.executed > 0 ? 1 : 0;
    }
    total += executed;
    std::fprintf(stderr,
                 "ptx machine: %s: %llu launches, %llu instructions of warps, %llu of %zu in the text\n",
                 function.name.c_str(), static_cast<unsigned long long>(function.kernel->launches),
                 static_cast<unsigned long long>(executed), static_cast<unsigned long long>(reached),
                 function.kernel->code.size());
  }
  std::fprintf(stderr, "ptx machine: %.1f million instructions of warps, %.1f million a second\n",
               static_cast<double>(total) / 1e6, static_cast<double>(total) / 1e6 / seconds_in_kernels());
}

void print_banks() {
  std::set<const FatBinary*> binaries;
  for (const auto& [host, function] : all_functions()) binaries.insert(function.binary);
  for (const FatBinary* binary : binaries) {
    for (const auto& module : binary->modules) std::fputs(banks_report(*module).c_str(), stderr);
  }
}

__attribute__((destructor)) void print() {
  if (options().summary && launches() > 0) {
    std::fprintf(stderr, "ptx machine: %llu launches, %.1f s, %llu reports, %.1f MB at most\n",
                 static_cast<unsigned long long>(launches()), seconds_in_kernels(),
                 static_cast<unsigned long long>(reports()), static_cast<double>(memory_use().most) / 1e6);
  }
  if (options().profile) print_profile();
  if (options().banks) print_banks();
}

}  // namespace

}  // namespace ptx_machine
