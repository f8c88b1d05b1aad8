// Implements memory: allocations, copies, what a pointer points to.
#include <cstring>

#include "memory.h"
#include "runtime/runtime.h"

namespace ptx_machine {

namespace {

cudaError_t allocated(void** pointer, size_t bytes, MemoryKind kind) {
  PTX_MACHINE_TURN;
  *pointer = allocate(bytes != 0 ? bytes : 1, kind);
  return *pointer != nullptr ? cudaSuccess : result(cudaErrorMemoryAllocation);
}

cudaError_t released(void* pointer) {
  return pointer == nullptr || release(pointer) ? cudaSuccess : result(cudaErrorInvalidValue);
}

}  // namespace

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return allocated(pointer, bytes, MemoryKind::kDevice);
}
// The function does not wait: torch's allocator, too, keeps memory until work that needs it is done.
PTX_MACHINE_EXPORT cudaError_t cudaFree(void* pointer) {
  PTX_MACHINE_TURN;
  for (Stream* stream : all_streams()) {
    if (stream->capture == nullptr || pointer == nullptr) continue;
    stream->capture->freed.push_back(pointer);
    return cudaSuccess;
  }
  if (!is_any_busy()) return released(pointer);
  if (pointer != nullptr) free_when_idle(pointer);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return cudaMalloc(pointer, bytes);
}
PTX_MACHINE_EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
PTX_MACHINE_EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return allocated(pointer, bytes, MemoryKind::kPinned);
}
PTX_MACHINE_EXPORT cudaError_t cudaFreeHost(void* pointer) {
  PTX_MACHINE_TURN;
  return released(pointer);
}
PTX_MACHINE_EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  PTX_MACHINE_TURN;
  register_memory(reinterpret_cast<u64>(pointer), bytes);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  PTX_MACHINE_TURN;
  unregister_memory(reinterpret_cast<u64>(pointer));
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  PTX_MACHINE_TURN;
  const MemoryUse use = memory_use();
  *total = use.total;
  *available = use.total - use.now;
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

PTX_MACHINE_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                        const void* pointer) {
  PTX_MACHINE_TURN;
  Range range;
  MemoryKind kind = MemoryKind::kDevice;
  const bool known = find_memory(reinterpret_cast<u64>(pointer), &range, &kind);
  const bool device = known && kind == MemoryKind::kDevice;
  *attributes = {};
  attributes->type = !known ? cudaMemoryTypeUnregistered : device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = known ? 0 : -2;
  attributes->devicePointer = known ? const_cast<void*>(pointer) : nullptr;
  attributes->hostPointer = device ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}

PTX_MACHINE_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                               cudaStream_t handle) {
  PTX_MACHINE_TURN;
  Stream& stream = stream_of(handle);
  if (kind == cudaMemcpyHostToDevice && stream.capture == nullptr && stream.busy) {
    // Pageable memory is read before the call returns.
    const auto* first = static_cast<const u8*>(from);
    const auto copy = std::make_shared<std::vector<u8>>(first, first + bytes);
    submit(stream, [=] { std::memcpy(to, copy->data(), bytes); });
    return cudaSuccess;
  }
  if (kind == cudaMemcpyDeviceToHost && stream.capture == nullptr) drain(stream);
  submit(stream, [=] { std::memmove(to, from, bytes); });
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  PTX_MACHINE_TURN;
  drain_all();
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                                   cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
PTX_MACHINE_EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  PTX_MACHINE_TURN;
  submit(stream_of(stream), [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
PTX_MACHINE_EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
