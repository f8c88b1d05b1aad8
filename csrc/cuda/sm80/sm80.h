// "sm80": attention on tensor cores by mma.sync, for compute capability 8.0 and later.
#pragma once

#include "../kernel.h"

namespace selfattn::cuda {

extern const Kernel kSm80;

}  // namespace selfattn::cuda
