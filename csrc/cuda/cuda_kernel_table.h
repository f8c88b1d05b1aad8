// The CUDA kernels in priority order, and the choice among them. Plain C++, which needs no CUDA headers.
#pragma once

#include <string>

#include "cuda_kernel.h"

namespace selfattn::cuda {

// Every kernel compiled into this library, best first.
const Kernel* const* all_kernels(int* count);

// A phrase for people that says why the kernel does not take a call on devices of compute capability
// major*10 + minor. It is empty if the kernel does take the call.
std::string refusal_of(const Kernel& kernel, const AttentionParams& params, int capability);

// The kernel that an attention call takes. `name` is "" (automatic) or a kernel's name. Throws
// std::invalid_argument with a sentence for people if the name is unknown, if the kernel asked for refuses
// the call, or if all of them do.
const Kernel& choose_kernel(const char* name, const AttentionParams& params, int capability);

}  // namespace selfattn::cuda
