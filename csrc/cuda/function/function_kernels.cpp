// Compiles and loads the kernels that contain a function, and makes their arguments.
#include "function_kernels.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace selfattn::cuda {

#if defined(CUDART_VERSION) && CUDART_VERSION >= 12080
#define SELFATTN_LOADS_LIBRARIES
#endif

namespace {

#if defined(SELFATTN_LOADS_LIBRARIES)

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next launch, even another library's, would report it again
  throw std::runtime_error(std::string("CUDA failed to ") + doing + ": " + cudaGetErrorString(status));
}

int current_capability() {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "name the current device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "describe the device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "describe the device");
  return major * 10 + minor;
}

// Returns "name<arguments>" of "void name<arguments>(parameters)".
std::string name_in_cpp(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  if (status != 0) throw std::runtime_error(std::string("a kernel's name cannot be demangled: ") + mangled);
  const std::string whole = text.get();
  int depth = 0;
  size_t begin = 0, end = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    if (whole[at] == '<') ++depth;
    if (whole[at] == ' ' && depth == 0 && end == 0) begin = at + 1;
    if (whole[at] == '>' && --depth == 0) {
      end = at + 1;
      break;
    }
  }
  return whole.substr(begin, end - begin);
}

// Returns nullptr if CUDA does not accept the code.
const void* load(const std::string& code, const char* name) {
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  // The library is never unloaded, because launches may still run when a process ends.
  const bool loaded =
      cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0) == cudaSuccess &&
      cudaLibraryGetKernel(&kernel, library, name) == cudaSuccess;
  if (!loaded) cudaGetLastError();
  return loaded ? reinterpret_cast<const void*>(kernel) : nullptr;
}

#endif

}  // namespace

std::vector<char> FunctionKernels::arguments_of(const ScoreFunction& function) const {
  const size_t of_tensor = static_cast<size_t>(1 + 2 * dims_) * sizeof(int64_t);
  const size_t of_tensors = of_tensor * static_cast<size_t>(std::max<int64_t>(tensors_, 1));
  const size_t of_numbers = static_cast<size_t>(numbers_) * sizeof(double);
  std::vector<char> bytes(of_tensors + std::max(of_numbers, sizeof(double)));
  for (int64_t n = 0; n < tensors_; ++n) {
    const CapturedTensor& tensor = function.inputs.tensors[n];
    char* const at = bytes.data() + static_cast<size_t>(n) * of_tensor;
    const size_t of_dims = static_cast<size_t>(tensor.rank) * sizeof(int64_t);
    std::memcpy(at, &tensor.data, sizeof(tensor.data));
    if (tensor.rank == 0) continue;
    std::memcpy(at + sizeof(int64_t), tensor.size, of_dims);
    std::memcpy(at + sizeof(int64_t) * static_cast<size_t>(1 + dims_), tensor.stride, of_dims);
  }
  if (numbers_ > 0) std::memcpy(bytes.data() + of_tensors, function.inputs.numbers, of_numbers);
  return bytes;
}

const void* FunctionKernels::find(const void* kernel) const {
#if defined(SELFATTN_LOADS_LIBRARIES)
  const int capability = current_capability();
  const std::pair<int, const void*> key(capability, kernel);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = found_.find(key);
    if (found != found_.end()) return found->second;
  }
  // The lock is not held here, because the compilation may wait for a thread that launches.
  const char* name = nullptr;
  check(cudaFuncGetName(&name, kernel), "name a kernel");
  for (const std::string& code : make_code_(name_in_cpp(name), capability)) {
    if (const void* loaded = load(code, name)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      return found_.emplace(key, loaded).first->second;
    }
  }
  throw std::runtime_error("CUDA accepts none of the code that was compiled of " + name_in_cpp(name));
#else
  (void)kernel;
  throw std::runtime_error("functions of scores on CUDA tensors need CUDA 12.8 or later, and this library " +
                           std::string("was built with an earlier one"));
#endif
}

}  // namespace selfattn::cuda
