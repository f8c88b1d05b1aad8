// Implements launches, with the checks that CUDA makes, and attributes of kernels.
#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "execute/warp.h"
#include "options.h"
#include "runtime/binaries.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

constexpr u32 kMostThreads = 1024, kMostThreadsZ = 64;
constexpr u32 kMostBlocksX = 0x7fffffff, kMostBlocksYZ = 65535;
constexpr u32 kMostParameterBytes = 32764;
constexpr int kRegistersOfMultiprocessor = 65536;

u64 launched = 0;
double seconds = 0;

std::string triple(dim3 of) {
  return "(" + std::to_string(of.x) + ", " + std::to_string(of.y) + ", " + std::to_string(of.z) + ")";
}

// Returns an error for what CUDA would refuse, and describes it in `problem`.
cudaError_t check(const Kernel& kernel, dim3 grid, dim3 block, size_t dynamic_shared, std::string* problem) {
  const u64 threads = u64{block.x} * block.y * block.z;
  if (u64{grid.x} * grid.y * grid.z == 0 || threads == 0 || grid.x > kMostBlocksX || grid.y > kMostBlocksYZ ||
      grid.z > kMostBlocksYZ || block.z > kMostThreadsZ || threads > kMostThreads) {
    *problem = triple(grid) + " blocks of " + triple(block) + " threads";
    return cudaErrorInvalidConfiguration;
  }
  if (threads > kernel.most_threads) {
    *problem = std::to_string(threads) + " threads, more than .maxntid";
    return cudaErrorLaunchOutOfResources;
  }
  if (dynamic_shared > kernel.most_dynamic_shared ||
      dynamic_shared + kernel.static_shared > shared_memory_limit(options().capability)) {
    *problem = std::to_string(dynamic_shared) + " bytes of dynamic shared memory, and " +
               std::to_string(kernel.most_dynamic_shared) + " are allowed";
    return cudaErrorInvalidValue;
  }
  if (kernel.parameter_bytes > kMostParameterBytes) {
    *problem = std::to_string(kernel.parameter_bytes) + " bytes of parameters";
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

Launch gather(const Kernel& kernel, dim3 grid, dim3 block, void** arguments, size_t dynamic_shared) {
  Launch launch{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, static_cast<u32>(dynamic_shared), {}};
  constexpr size_t kPadding = 16;  // vector reads of parameters may go beyond the end
  launch.parameters.assign(kernel.parameter_bytes + kPadding, 0xff);
  for (size_t n = 0; n < kernel.parameters.size(); ++n) {
    const Kernel::Parameter& parameter = kernel.parameters[n];
    std::memcpy(launch.parameters.data() + parameter.offset, arguments[n], parameter.bytes);
  }
  return launch;
}

cudaError_t run(Kernel& kernel, const Launch& launch) {
  const double begin = now();
  cudaError_t error = cudaSuccess;
  try {
    execute(kernel, launch);
  } catch (const std::runtime_error& problem) {
    report(problem.what());
    error = cudaErrorLaunchFailure;
  }
  seconds += now() - begin;
  return error;
}

cudaError_t launch_kernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t dynamic_shared,
                          cudaStream_t handle) {
  PTX_MACHINE_TURN;
  Stream& stream = stream_of(handle);
  Function* function = find_function(host);
  if (function == nullptr) return result(cudaErrorInvalidDeviceFunction);
  if (function->name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep launches this
    if (stream.capture == nullptr) stream.busy = true;
    submit(stream, [] {});
    return cudaSuccess;
  }
  if (function->kernel == nullptr) {
    report("ptx machine: a launch of " + function->name + ", of which there is no PTX that can be read");
    return result(cudaErrorNoKernelImageForDevice);
  }
  Kernel& kernel = *function->kernel;
  std::string problem;
  const cudaError_t refused = check(kernel, grid, block, dynamic_shared, &problem);
  if (refused != cudaSuccess) {
    report("ptx machine: a launch of " + function->name + " with " + problem);
    return result(refused);
  }
  ++kernel.launches;
  ++launched;
  if (options().verbose > 0) {
    std::fprintf(stderr, "ptx machine: %s <<<%s, %s, %zu>>>\n", function->name.c_str(), triple(grid).c_str(),
                 triple(block).c_str(), dynamic_shared);
  }
  if (!options().execute) return cudaSuccess;
  const Launch launch = gather(kernel, grid, block, arguments, dynamic_shared);
  if (stream.capture == nullptr && !stream.busy) return result(run(kernel, launch));
  submit(stream, [&kernel, launch] { run(kernel, launch); });
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

u64 launches() { return launched; }
double seconds_in_kernels() { return seconds; }

}  // namespace ptx_machine

using namespace ptx_machine;

// nvcc translates kernel<<<...>>>(...) to this.
PTX_MACHINE_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                        cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
PTX_MACHINE_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared,
                                                          void* stream) {
  if (configurations.empty()) return result(cudaErrorMissingConfiguration);
  const Configuration top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                                  void** arguments, size_t shared, cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, arguments, shared, stream);
}
PTX_MACHINE_EXPORT cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments,
                                                size_t shared, cudaStream_t stream) {
  return launch_kernel(host, grid, block, arguments, shared, stream);
}
PTX_MACHINE_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* host,
                                                   void** arguments) {
  return launch_kernel(host, configuration->gridDim, configuration->blockDim, arguments,
                       configuration->dynamicSmemBytes, configuration->stream);
}

PTX_MACHINE_EXPORT cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute,
                                                    int value) {
  PTX_MACHINE_TURN;
  Function* function = find_function(host);
  if (function == nullptr || function->kernel == nullptr) return result(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 ||
      static_cast<u32>(value) + function->kernel->static_shared > shared_memory_limit(options().capability)) {
    return result(cudaErrorInvalidValue);
  }
  function->kernel->most_dynamic_shared = static_cast<u32>(value);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host) {
  PTX_MACHINE_TURN;
  const Function* function = find_function(host);
  if (function == nullptr) return result(cudaErrorInvalidDeviceFunction);
  if (function->kernel == nullptr) return result(cudaErrorNoKernelImageForDevice);
  const Kernel& kernel = *function->kernel;
  *attributes = {};
  attributes->sharedSizeBytes = kernel.static_shared;
  attributes->localSizeBytes = kernel.local_bytes;
  attributes->maxThreadsPerBlock = static_cast<int>(kernel.most_threads);
  // ptxas decides the number; it is no larger than this.
  attributes->numRegs = std::min(255, kRegistersOfMultiprocessor / static_cast<int>(kernel.most_threads));
  attributes->ptxVersion = attributes->binaryVersion = options().capability;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(kernel.most_dynamic_shared);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                                      const void*, int,
                                                                                      size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
