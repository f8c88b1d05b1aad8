// The CPU kernels in priority order, and the choice among them.
#pragma once

#include <string>

#include "kernel.h"

namespace selfattn::cpu {

// Every kernel compiled into this library, best first. Entries whose ISA this machine lacks are listed too.
const Kernel* const* all_kernels(int* count);

// nullptr when the machine can run the kernel, otherwise why not.
const char* unavailable_reason(const Kernel& kernel);

// The kernel a call takes. `name` is "" (automatic), "fused" or "loops". Throws std::invalid_argument with a
// sentence for people when the name or the forced ISA is unknown or cannot run here. All kernels take every
// dtype.
const Kernel& choose_kernel(const char* name);

// The forced ISA: SELFATTN_CPU_ISA on first use, or the last force_isa(). "" is automatic.
// force_isa throws std::invalid_argument for an unknown or unavailable name and then changes nothing.
std::string forced_isa();
void force_isa(const std::string& isa);

}  // namespace selfattn::cpu
