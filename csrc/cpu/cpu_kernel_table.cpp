// The table of CPU kernels: every operator finds a kernel once it has a line here.
#include "cpu_kernel_table.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "amx_permission.h"
#include "cpu_features.h"
#include "loops/loops.h"

namespace selfattn::cpu {

// For tests, a library has the CUDA kernels in their place, on memory of the host (simulators/ptx_machine).
#if defined(__x86_64__) && !defined(SELFATTN_CUDA_ON_HOST)
extern const Kernel kFusedAmx;
extern const Kernel kFusedAvx512Bf16;
extern const Kernel kFusedAvx512;
extern const Kernel kFusedAvx2;
#elif defined(__aarch64__) && !defined(SELFATTN_CUDA_ON_HOST)
extern const Kernel kFusedNeon;
#endif
extern const Kernel kFusedScalar;
#if defined(SELFATTN_CUDA_ON_HOST)
extern const Kernel kCudaSm90;
extern const Kernel kCudaSm80;
extern const Kernel kCudaSimt;
#endif

namespace {

const Kernel* const kKernels[] = {
#if defined(__x86_64__) && !defined(SELFATTN_CUDA_ON_HOST)
    &kFusedAmx,    &kFusedAvx512Bf16, &kFusedAvx512, &kFusedAvx2,
#elif defined(__aarch64__) && !defined(SELFATTN_CUDA_ON_HOST)
    &kFusedNeon,
#endif
    &kFusedScalar, &kLoops,
#if defined(SELFATTN_CUDA_ON_HOST)
    &kCudaSm90,    &kCudaSm80,        &kCudaSimt,
#endif
};
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);

constexpr const char* kIsaVariable = "SELFATTN_CPU_ISA";
constexpr const char* kAutomatic = "";

bool equal(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

// Lists the names in one column of the table for messages, each once: "avx512", "avx2", "scalar".
std::string known_names(const char* Kernel::* field) {
  std::string names;
  for (int n = 0; n < kKernelCount; ++n) {
    bool repeated = false;
    for (int m = 0; m < n; ++m) repeated |= equal(kKernels[m]->*field, kKernels[n]->*field);
    if (!repeated) names += std::string(names.empty() ? "\"" : ", \"") + kKernels[n]->*field + "\"";
  }
  return names;
}

// Returns the ISA as the table spells it; "" (automatic) stays "".
const char* checked_isa(const std::string& isa) {
  if (isa.empty()) return kAutomatic;
  const char* reason = nullptr;
  for (const Kernel* kernel : kKernels) {
    if (!kernel->automatic || isa != kernel->isa) continue;
    reason = unavailable_reason(*kernel);
    if (reason == nullptr) return kernel->isa;
  }
  const std::string asked =
      std::string("the instruction set ") + "\"" + isa + "\" (see " + kIsaVariable + ") ";
  if (reason != nullptr) throw std::invalid_argument(asked + "cannot be used: " + reason);
  throw std::invalid_argument(asked + "is unknown; this library has " + known_names(&Kernel::isa));
}

// Tells whether a kernel that can run is worth taking unasked. VDPBF16PS runs at the rate of a multiply-add
// on AMD's processors, but at half of it on Intel's (docs/cpu-kernels.md).
bool worthwhile(const Kernel& kernel) { return !equal(kernel.isa, "avx512_bf16") || cpu_features().amd; }

// Every call of an operator reads the forced ISA, hence the atomic beside the lock. It is nullptr until the
// ISA is known.
std::atomic<const char*> forced{nullptr};
std::mutex forced_mutex;

const char* current_isa() {
  const char* isa = forced.load(std::memory_order_acquire);
  if (isa != nullptr) return isa;
  std::lock_guard<std::mutex> lock(forced_mutex);
  isa = forced.load(std::memory_order_relaxed);
  if (isa != nullptr) return isa;
  const char* variable = std::getenv(kIsaVariable);
  isa = checked_isa(variable != nullptr ? variable : "");
  forced.store(isa, std::memory_order_release);
  return isa;
}

}  // namespace

const Kernel* const* all_kernels(int* count) {
  *count = kKernelCount;
  return kKernels;
}

const char* unavailable_reason(const Kernel& kernel) {
  const CpuFeatures& f = cpu_features();
  const bool avx512 = f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl && f.avx2 && f.fma && f.f16c;
  if (equal(kernel.isa, "avx512")) {
    return avx512 ? nullptr : "this processor or operating system lacks AVX-512 (F, BW, DQ, VL)";
  }
  if (equal(kernel.isa, "amx")) {
    if (const char* reason = amx_unavailable_reason()) return reason;
    return avx512 && f.avx512_bf16 ? nullptr : "this processor or operating system lacks AVX-512 BF16";
  }
  if (equal(kernel.isa, "avx512_bf16")) {
    return avx512 && f.avx512_bf16 ? nullptr : "this processor or operating system lacks AVX-512 BF16";
  }
  if (equal(kernel.isa, "avx2")) {
    return f.avx2 && f.fma && f.f16c ? nullptr : "this processor or operating system lacks AVX2, FMA or F16C";
  }
  return nullptr;
}

const Kernel& choose_kernel(const char* name) {
  const char* isa = current_isa();
  bool known = false;
  for (const Kernel* kernel : kKernels) {
    const bool wanted = *name == '\0' ? kernel->automatic : equal(name, kernel->name);
    if (!wanted) continue;
    known = true;
    // Kernels that are taken only by name exist once, whatever the instruction set.
    if (kernel->automatic && (*isa != '\0' ? !equal(isa, kernel->isa) : !worthwhile(*kernel))) continue;
    if (unavailable_reason(*kernel) != nullptr) continue;
    return *isa != '\0' && kernel->when_forced != nullptr ? *kernel->when_forced : *kernel;
  }
  if (known) {
    throw std::invalid_argument(std::string("kernel \"") + name +
                                "\" is not compiled for the forced instruction set \"" + isa + "\"");
  }
  throw std::invalid_argument(std::string("kernel must be \"\" (automatic) or one of ") +
                              known_names(&Kernel::name) + ", but it is \"" + name + "\"");
}

std::string forced_isa() { return current_isa(); }

void force_isa(const std::string& isa) {
  const char* checked = checked_isa(isa);
  std::lock_guard<std::mutex> lock(forced_mutex);
  forced.store(checked, std::memory_order_release);
}

}  // namespace selfattn::cpu
