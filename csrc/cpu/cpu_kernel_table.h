// The CPU kernels in priority order, and the choice among them.
#pragma once

#include <string>

#include "cpu_kernel.h"

namespace selfattn::cpu {

// Lists every kernel compiled into this library, best first, also those whose ISA this machine lacks.
const Kernel* const* all_kernels(int* count);

// Returns nullptr if this machine can run the kernel, otherwise why not.
const char* unavailable_reason(const Kernel& kernel);

// Returns the kernel that a call takes. `name` is "" (automatic), "fused" or "loops". Throws
// std::invalid_argument with a sentence for people if the name or the forced ISA is unknown or cannot run
// here. All kernels take every dtype.
const Kernel& choose_kernel(const char* name);

// The forced ISA is SELFATTN_CPU_ISA on first use, or that of the last force_isa(); "" is automatic.
// force_isa throws std::invalid_argument for an unknown or unavailable name and then changes nothing.
std::string forced_isa();
void force_isa(const std::string& isa);

}  // namespace selfattn::cpu
