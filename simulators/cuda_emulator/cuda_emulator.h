// CUDA C++ for a host compiler: what csrc/cuda/common/device.cuh includes instead of CUDA's headers. Include
// it after every other header, because it defines words that others use, too (min, max, __global__).
#pragma once

#include "vector_types.h"

#include "atomics.h"
#include "device_math.h"
#include "launch.h"
#include "options.h"
#include "warp_functions.h"
