// Implements the one device, versions and errors.
#include <cstdio>
#include <cstring>

#include "memory.h"
#include "options.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

constexpr int kVersion = 13000;
constexpr int kReservedShared = 1024;
constexpr int kRegisters = 65536;
constexpr int kMultiprocessors = 132;
constexpr int kMostGridX = 0x7fffffff, kMostGridYZ = 65535;
constexpr int kThreads = 1024, kThreadsZ = 64;
constexpr int kThreadsOfMultiprocessor = 2048, kBlocksOfMultiprocessor = 32;
constexpr int kConstantBytes = 65536;
constexpr int kCacheBytes = 60 << 20;

thread_local cudaError_t last_error = cudaSuccess;
u64 reported = 0;

int shared_opt_in() { return static_cast<int>(shared_memory_limit(options().capability)); }

int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return kThreads;
    case cudaDevAttrMaxBlockDimZ:
      return kThreadsZ;
    case cudaDevAttrMaxGridDimX:
      return kMostGridX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return kMostGridYZ;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return kSharedWithoutAsking;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return shared_opt_in();
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return shared_opt_in() + kReservedShared;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return kReservedShared;
    case cudaDevAttrTotalConstantMemory:
      return kConstantBytes;
    case cudaDevAttrWarpSize:
      return kLanes;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return kRegisters;
    case cudaDevAttrMultiProcessorCount:
      return kMultiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return kThreadsOfMultiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return kBlocksOfMultiprocessor;
    case cudaDevAttrComputeCapabilityMajor:
      return options().capability / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return options().capability % 10;
    case cudaDevAttrL2CacheSize:
      return kCacheBytes;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrEccEnabled:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrStreamPrioritiesSupported:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void report(const std::string& text) {
  ++reported;
  std::fprintf(stderr, "%s\n", text.c_str());
  if (!options().log.empty()) {
    if (std::FILE* file = std::fopen(options().log.c_str(), "a")) {
      std::fprintf(file, "%s\n", text.c_str());
      std::fclose(file);
    }
  }
  if (options().abort) std::abort();
}

u64 reports() { return reported; }

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : result(cudaErrorInvalidDevice);
}
PTX_MACHINE_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "PTX machine");
  properties->totalGlobalMem = memory_use().total;
  properties->sharedMemPerBlock = kSharedWithoutAsking;
  properties->sharedMemPerBlockOptin = static_cast<size_t>(shared_opt_in());
  properties->sharedMemPerMultiprocessor = static_cast<size_t>(shared_opt_in() + kReservedShared);
  properties->reservedSharedMemPerBlock = kReservedShared;
  properties->regsPerBlock = properties->regsPerMultiprocessor = kRegisters;
  properties->warpSize = kLanes;
  properties->maxThreadsPerBlock = kThreads;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreads;
  properties->maxThreadsDim[2] = kThreadsZ;
  properties->maxGridSize[0] = kMostGridX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = kMostGridYZ;
  properties->totalConstMem = kConstantBytes;
  properties->major = options().capability / 10;
  properties->minor = options().capability % 10;
  properties->multiProcessorCount = kMultiprocessors;
  properties->maxThreadsPerMultiProcessor = kThreadsOfMultiprocessor;
  properties->maxBlocksPerMultiProcessor = kBlocksOfMultiprocessor;
  properties->l2CacheSize = kCacheBytes;
  properties->concurrentKernels = properties->unifiedAddressing = properties->managedMemory = 1;
  properties->ECCEnabled = properties->streamPrioritiesSupported = properties->cooperativeLaunch = 1;
  properties->canMapHostMemory = 1;
  properties->asyncEngineCount = 3;
  properties->memoryBusWidth = 6144;
  properties->textureAlignment = 512;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice);
  *value = attribute(which);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
  std::snprintf(text, static_cast<size_t>(length), "0000:01:00.0");
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

PTX_MACHINE_EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
PTX_MACHINE_EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
PTX_MACHINE_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure; the PTX machine has reported it";
    case cudaErrorLaunchOutOfResources:
      return "too many resources requested for launch";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "an error that the PTX machine has no words for";
  }
}
PTX_MACHINE_EXPORT const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
PTX_MACHINE_EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
PTX_MACHINE_EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// This is for operators/fallback.cpp, which includes no header of this program.
PTX_MACHINE_EXPORT bool ptx_machine_is_idle(void* stream) {
  PTX_MACHINE_TURN;
  const Stream& asked = stream_of(static_cast<cudaStream_t>(stream));
  return asked.capture == nullptr && !asked.busy;
}
PTX_MACHINE_EXPORT void ptx_machine_submit(void* stream, std::function<void()>* work) {
  PTX_MACHINE_TURN;
  submit(stream_of(static_cast<cudaStream_t>(stream)), *work);
}
// The functions that refusals.py writes return this.
extern "C" int ptx_machine_refuse(const char* name) {
  std::fprintf(stderr, "ptx machine: %s is missing\n", name);
  return result(cudaErrorNotSupported);
}
