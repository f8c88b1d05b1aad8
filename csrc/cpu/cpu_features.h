// The features that processor and operating system offer, detected once.
#pragma once

namespace selfattn::cpu {

struct CpuFeatures {
  const char* architecture;  // "x86-64", "arm64", "other"
  bool amd;                  // made by AMD, or by Hygon with AMD's cores: the speeds of instructions differ
  bool avx2, fma, f16c;
  bool avx512f, avx512bw, avx512dq, avx512vl;
  bool avx512_vbmi, avx512_bf16, avx512_fp16;
  bool amx_tile, amx_bf16;
  bool amx_bf16_unsaved;  // the processor has AMX-BF16, but the operating system does not save its registers
  bool neon, neon_fp16, neon_bf16, sve;  // those after the first are for people; no kernel asks for them
};

// A vector feature counts only if the operating system saves its registers.
const CpuFeatures& cpu_features();

// One name and flag per feature, for people: cpu_feature(0..count-1).
struct CpuFeature {
  const char* name;
  bool present;
};
int cpu_feature_count();
CpuFeature cpu_feature(int index);

}  // namespace selfattn::cpu
