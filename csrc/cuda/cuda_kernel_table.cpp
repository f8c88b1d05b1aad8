// The table of CUDA kernels: a kernel that has a line here is found by every op.
#include "cuda_kernel_table.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "../core/option_names.h"
#include "simt/simt.h"
#include "sm80/sm80.h"
#include "sm90/sm90.h"

namespace selfattn::cuda {

namespace {

const Kernel* const kKernels[] = {
    &kSm90,
    &kSm80,
    &kSimt,
};
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);

std::string quoted(const char* name) { return std::string("\"") + name + "\""; }

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

const Kernel* kernel_named(const char* name) {
  std::string known;
  for (const Kernel* kernel : kKernels) {
    if (std::strcmp(name, kernel->name) == 0) return kernel;
    known += (known.empty() ? "" : ", ") + quoted(kernel->name);
  }
  throw std::invalid_argument("kernel must be \"\" (automatic) or, on CUDA, one of " + known +
                              ", but it is " + quoted(name));
}

}  // namespace

const Kernel* const* all_kernels(int* count) {
  *count = kKernelCount;
  return kKernels;
}

std::string refusal_of(const Kernel& kernel, const AttentionParams& params, int capability) {
  if (const char* reason = kernel.refuses(params, capability)) return reason;
  const OptionSet missing = options_of(params).without(kernel.options);
  return missing.empty() ? "" : "it does not apply " + names_of(missing);
}

const Kernel& choose_kernel(const char* name, const AttentionParams& params, int capability) {
  if (*name != '\0') {
    const Kernel* kernel = kernel_named(name);
    const std::string reason = refusal_of(*kernel, params, capability);
    if (reason.empty()) return *kernel;
    throw std::invalid_argument("kernel " + quoted(name) + " cannot run this call on a device of compute " +
                                "capability " + capability_text(capability) + ": " + reason);
  }
  std::string reasons;
  for (const Kernel* kernel : kKernels) {
    const std::string reason = refusal_of(*kernel, params, capability);
    if (reason.empty()) return *kernel;
    reasons += (reasons.empty() ? "" : "; ") + quoted(kernel->name) + ": " + reason;
  }
  throw std::invalid_argument("no CUDA kernel can run this call on a device of compute capability " +
                              capability_text(capability) + " (" + reasons + ")");
}

}  // namespace selfattn::cuda
