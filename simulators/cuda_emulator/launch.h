// The launch of a kernel, and the words of device.cuh that depend on the machine.
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>

#include "vector_types.h"

// Marks a device function that is called rather than inlined.
#define SELFATTN_CALLED __attribute__((noinline))

#define SELFATTN_DYNAMIC_SHARED(name) unsigned char* const name = selfattn::emulator::dynamic_shared_memory()

namespace selfattn::emulator {

unsigned char* dynamic_shared_memory();

// Checks the launch as CUDA does, then runs it. Throws std::runtime_error.
void launch(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void* context), void* context);

}  // namespace selfattn::emulator

namespace selfattn::cuda {

inline void clear_async(void* memory, size_t bytes, cudaStream_t) { std::memset(memory, 0, bytes); }

// There are few multiprocessors, so that blocks of a persistent kernel take several items of work.
inline int multiprocessors() { return 3; }

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
            const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {arguments...}};
  static_assert(sizeof(call.arguments) <= 4096,
                "a kernel has at most 4096 bytes of parameters on every device");
  emulator::launch(
      grid, block, shared_bytes,
      [](void* context) {
        const Call& call = *static_cast<const Call*>(context);
        std::apply(call.kernel, call.arguments);
      },
      &call);
}

}  // namespace selfattn::cuda
