// "sm90": attention on the tensor cores of Hopper by wgmma and TMA, for compute capability 9.0.
#pragma once

#include "../kernel.h"

namespace selfattn::cuda {

extern const Kernel kSm90;

}  // namespace selfattn::cuda
