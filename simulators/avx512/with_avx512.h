// The processor's features with those added that are emulated.
#pragma once

#include "cpu/cpu_features.h"

namespace selfattn::cpu {

inline CpuFeatures with_avx512(CpuFeatures f) {
  f.avx512f = f.avx512bw = f.avx512dq = f.avx512vl = f.avx512_bf16 = true;
  return f;
}

}  // namespace selfattn::cpu
