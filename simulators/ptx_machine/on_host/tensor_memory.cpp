// Memory of the CPU's tensors from the machine: each tensor is an allocation of its own, between margins that
// nobody may touch, and full of NaN at first.
#include <c10/core/CPUAllocator.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <new>

namespace {

void release(void* memory) { cudaFree(memory); }

class MachineAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0 && cudaMalloc(&memory, bytes) != cudaSuccess) throw std::bad_alloc();
    return {memory, memory, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

// Tensors live until the end of the process, and so does this.
const bool is_set = [] {
  constexpr uint8_t kHighestPriority = 255;
  c10::SetCPUAllocator(new MachineAllocator, kHighestPriority);
  return true;
}();

}  // namespace
