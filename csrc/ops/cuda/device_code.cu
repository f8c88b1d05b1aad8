// Asks CUDA for the compute capability of a device, and whether the kernels run there.
#include "device_code.h"

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace selfattn::ops {

namespace {

#define SELFATTN_TEXT_OF(...) #__VA_ARGS__
#define SELFATTN_TEXT(...) SELFATTN_TEXT_OF(__VA_ARGS__)

// The probe runs on a device exactly if the kernels do, because all are compiled for the same architectures.
__global__ void probe() {}

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// The architectures as people write them. The build's list is "7.5/8.0". nvcc's own list, "750,800", lacks
// those for which only machine code is made.
std::string architectures() {
#if defined(SELFATTN_CUDA_ARCHITECTURES)
  std::string text;
  for (const char character : std::string(SELFATTN_TEXT(SELFATTN_CUDA_ARCHITECTURES))) {
    text += character == '/' ? ", " : std::string(1, character);
  }
#else
  const std::string list = SELFATTN_TEXT(__CUDA_ARCH_LIST__) ",";
  std::string text;
  for (size_t begin = 0, end; (end = list.find(',', begin)) != std::string::npos; begin = end + 1) {
    if (!text.empty()) text += ", ";
    text += capability_text(std::stoi(list.substr(begin, end - begin)) / 10);
  }
#endif
  return text;
}

void check(cudaError_t error, const char* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next launch would report the error as its own
  throw std::runtime_error(std::string("CUDA cannot ") + action + ": " + cudaGetErrorString(error));
}

int asked_capability(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "tell the compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "tell the compute capability");
  const int capability = major * 10 + minor;
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    throw std::runtime_error("this build of selfattn_ext has CUDA kernels for compute capability " +
                             std::string(cuda_architectures()) + ", and the GPU has " +
                             capability_text(capability) + ": install it again on this machine, or with " +
                             "TORCH_CUDA_ARCH_LIST=" + capability_text(capability));
  }
  check(error, "load the kernels");
  return capability;
}

}  // namespace

const char* cuda_compiler() {
  return "nvcc " SELFATTN_TEXT(__CUDACC_VER_MAJOR__) "." SELFATTN_TEXT(
      __CUDACC_VER_MINOR__) "." SELFATTN_TEXT(__CUDACC_VER_BUILD__);
}

const char* cuda_architectures() {
  static const std::string text = architectures();
  return text.c_str();
}

int usable_capability(int device) {
  constexpr int kRemembered = 64;
  static std::atomic<int> known[kRemembered];  // 0: not asked yet
  if (device < 0 || device >= kRemembered) return asked_capability(device);
  int capability = known[device].load(std::memory_order_relaxed);
  if (capability == 0) {
    capability = asked_capability(device);
    known[device].store(capability, std::memory_order_relaxed);
  }
  return capability;
}

}  // namespace selfattn::ops
