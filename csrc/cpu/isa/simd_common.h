// What all instruction sets include and define, before a target region opens. Code that they share must be
// compiled for the baseline only, or one copy with wide instructions could be linked into all of them.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>

#include "../../core/attention_params.h"
#include "../../core/dtype.h"
#include "../../core/integers.h"
#include "../../core/philox.h"
#include "../../core/sequences.h"
#include "../../core/visible_range.h"
#include "../joint_task.h"
#include "../cpu_kernel.h"
#include "../parallel.h"

// Inlining is forced: a helper left out of line would pass vectors through memory, and an extension that is
// compiled without -O (torch.utils.cpp_extension.load passes none) would inline nothing at all.
#define SELFATTN_INLINE inline __attribute__((always_inline))

// Inlining is forbidden for what many places call once per block or more seldom: copies of such functions
// were a quarter of the code, and of the time to compile it.
#define SELFATTN_OUT_OF_LINE __attribute__((noinline))

// The micro-kernels' loops over a tile must be unrolled completely for it to live in registers. A loop that
// is seldom reached stays one: copies of it would only take time to compile.
#if defined(__clang__)
#define SELFATTN_UNROLL _Pragma("unroll")
#define SELFATTN_ROLL _Pragma("nounroll")
#else
#define SELFATTN_UNROLL _Pragma("GCC unroll 16")
#define SELFATTN_ROLL _Pragma("GCC unroll 1")
#endif
