// Launches, shared memory and errors of CUDA, as every kernel uses them.
//
// All shared memory is dynamic, so that a block has one array of it, whose size the launch knows.
#pragma once

#include <cstddef>

#if !defined(__CUDACC_RTC__)  // nvrtc knows CUDA by itself
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#endif

// A device function that is called rather than inlined. This is for rare code, so that its registers are not
// added to the kernel's.
#define SELFATTN_CALLED __noinline__

// Declares `name`: the dynamic shared memory of the block, an array of bytes aligned to 128.
#define SELFATTN_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace selfattn::cuda {

#if defined(__CUDACC_RTC__)

// nvrtc needs only this declaration, because the host code that it reads with the kernels names launch().
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments);

#else

inline void check_cuda(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next launch, even another library's, would report it again
  throw std::runtime_error(std::string("CUDA failed to ") + doing + ": " + cudaGetErrorString(status));
}

// Kernels may use this much dynamic shared memory without cudaFuncSetAttribute.
constexpr size_t kSharedMemoryUnasked = 48 * 1024;

inline void allow_shared_memory(const void* kernel, size_t bytes) {
  if (bytes <= kSharedMemoryUnasked) return;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "give a kernel its shared memory");
}

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), with errors as std::runtime_error.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  check_cuda(cudaGetLastError(), "launch a kernel");
}

// Fills memory with zeros, in the order of the stream.
inline void clear_async(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream), "clear memory");
}

// The number of multiprocessors of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "tell the current device");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "count multiprocessors");
  return count;
}

#endif

constexpr int kWarp = 32;  // lanes
constexpr unsigned kWholeWarp = 0xffffffffu;

}  // namespace selfattn::cuda
