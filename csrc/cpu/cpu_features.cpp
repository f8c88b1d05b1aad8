// Detects the features: by CPUID on x86-64, by what Linux and macOS tell on arm64.
#include "cpu_features.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace selfattn::cpu {

namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Returns zeros for a leaf that the processor does not have.
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool made_by_amd() {
  const Registers r = cpuid(0, 0);
  char vendor[13] = {};
  std::memcpy(vendor, &r.ebx, 4);
  std::memcpy(vendor + 4, &r.edx, 4);
  std::memcpy(vendor + 8, &r.ecx, 4);
  return std::strcmp(vendor, "AuthenticAMD") == 0 || std::strcmp(vendor, "HygonGenuine") == 0;
}

bool bit(unsigned value, int index) { return ((value >> index) & 1u) != 0; }

// Returns which registers the operating system saves. The instruction is spelled out because its intrinsic
// needs -mxsave.
uint64_t saved_registers() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

CpuFeatures detect() {
  constexpr uint64_t kYmm = 0x6;       // xmm and ymm
  constexpr uint64_t kZmm = 0xe6;      // and zmm, mask registers
  constexpr uint64_t kTile = 0x60000;  // AMX configuration and tiles

  CpuFeatures f{};
  f.architecture = "x86-64";
  f.amd = made_by_amd();
  const Registers basic = cpuid(1, 0);
  const bool has_xgetbv = bit(basic.ecx, 27);
  const uint64_t saved = has_xgetbv ? saved_registers() : 0;
  const Registers extended = cpuid(7, 0);
  const Registers extended1 = cpuid(7, 1);
  if ((saved & kYmm) == kYmm && bit(basic.ecx, 28)) {
    f.fma = bit(basic.ecx, 12);
    f.f16c = bit(basic.ecx, 29);
    f.avx2 = bit(extended.ebx, 5);
  }
  if ((saved & kZmm) == kZmm) {
    f.avx512f = bit(extended.ebx, 16);
    f.avx512dq = bit(extended.ebx, 17);
    f.avx512bw = bit(extended.ebx, 30);
    f.avx512vl = bit(extended.ebx, 31);
    f.avx512_vbmi = bit(extended.ecx, 1);
    f.avx512_fp16 = bit(extended.edx, 23);
    f.avx512_bf16 = bit(extended1.eax, 5);
  }
  if ((saved & kTile) == kTile) {
    f.amx_tile = bit(extended.edx, 24);
    f.amx_bf16 = bit(extended.edx, 22);
  } else {
    f.amx_bf16_unsaved = bit(extended.edx, 24) && bit(extended.edx, 22);
  }
  return f;
}

#elif defined(__aarch64__)

#if defined(__APPLE__)
bool told(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

CpuFeatures detect() {
  CpuFeatures f{};
  f.architecture = "arm64";
  f.neon = true;  // part of the base architecture
#if defined(__linux__)
  // The numbers are Linux's; headers older than a feature lack its name.
  constexpr unsigned long kHalves = 1ul << 10, kSve = 1ul << 22, kBFloat16 = 1ul << 14;
  f.neon_fp16 = (getauxval(AT_HWCAP) & kHalves) != 0;
  f.sve = (getauxval(AT_HWCAP) & kSve) != 0;
  f.neon_bf16 = (getauxval(AT_HWCAP2) & kBFloat16) != 0;
#elif defined(__APPLE__)
  f.neon_fp16 = told("hw.optional.arm.FEAT_FP16");
  f.neon_bf16 = told("hw.optional.arm.FEAT_BF16");
#endif
  return f;
}

#else

CpuFeatures detect() {
  CpuFeatures f{};
  f.architecture = "other";
  return f;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

int cpu_feature_count() { return 16; }

CpuFeature cpu_feature(int index) {
  const CpuFeatures& f = cpu_features();
  const CpuFeature features[] = {
      {"avx2", f.avx2},
      {"fma", f.fma},
      {"f16c", f.f16c},
      {"avx512f", f.avx512f},
      {"avx512bw", f.avx512bw},
      {"avx512dq", f.avx512dq},
      {"avx512vl", f.avx512vl},
      {"avx512_vbmi", f.avx512_vbmi},
      {"avx512_bf16", f.avx512_bf16},
      {"avx512_fp16", f.avx512_fp16},
      {"amx_tile", f.amx_tile},
      {"amx_bf16", f.amx_bf16},
      {"neon", f.neon},
      {"neon_fp16", f.neon_fp16},
      {"neon_bf16", f.neon_bf16},
      {"sve", f.sve},
  };
  static_assert(sizeof(features) / sizeof(features[0]) == 16);
  return features[index];
}

}  // namespace selfattn::cpu
