// Launches of kernels that may contain the call's function.
//
// See Note [Functions in kernels] in function_tile.cuh.
#pragma once

#include "../common/grid.cuh"
#if !defined(__CUDACC_RTC__)
#include <cstddef>
#include <tuple>
#include <vector>

#include "../../core/attention_params.h"
#include "function_kernels.h"
#endif

namespace selfattn::cuda {

#if defined(__CUDACC_RTC__)

// Code that nvrtc compiles launches nothing.
template <class... Parameters, class... Arguments>
void launch_with_function(const ScoreFunction&, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                          size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  launch(kernel, grid, block, shared_bytes, stream, arguments...);
}

#else

static_assert(offsetof(AttentionParams, function) + sizeof(ScoreFunction) == sizeof(AttentionParams),
              "the function's arguments follow the parameters");

// Launches `kernel` with a function. The function's arguments follow the bytes of the first argument, which
// is AttentionParams or ends with it.
template <class First, class... Others>
void launch_function_kernel(const ScoreFunction& function, const void* kernel, dim3 grid, dim3 block,
                            size_t shared_bytes, cudaStream_t stream, const First& first,
                            const Others&... others) {
  static_assert(sizeof(First) % sizeof(int64_t) == 0, "the function's arguments are aligned");
  const FunctionKernels& kernels = *function.table->device;
  const std::vector<char> more = kernels.arguments_of(function);
  const auto* own = reinterpret_cast<const char*>(&first);
  std::vector<char> bytes(own, own + sizeof(First));
  bytes.insert(bytes.end(), more.begin(), more.end());
  void* arguments[] = {bytes.data(), const_cast<Others*>(&others)...};
  const void* const made = kernels.find(kernel);
  allow_shared_memory(made, shared_bytes);
  check_cuda(cudaLaunchKernel(made, grid, block, arguments, shared_bytes, stream), "launch a kernel");
}

// Launches kernel<<<grid, block, shared_bytes, stream>>>(arguments...) or, if the call has a function, the
// same kernel compiled with it.
template <class... Parameters, class... Arguments>
void launch_with_function(const ScoreFunction& function, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                          size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  if (!function.any()) return launch(kernel, grid, block, shared_bytes, stream, arguments...);
  const std::tuple<std::remove_cv_t<Parameters>...> given(arguments...);  // in the kernel's own types
  std::apply(
      [&](const auto&... each) {
        launch_function_kernel(function, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes,
                               stream, each...);
      },
      given);
}

#endif

// Does the same as launch_blocks, with the call's function.
template <class... Parameters, class... Arguments>
void launch_blocks_with_function(const ScoreFunction& function, void (*kernel)(Parameters...), int64_t blocks,
                                 int threads, size_t shared_bytes, const Launch& where,
                                 const Arguments&... arguments) {
  for_each_grid(blocks, [&](dim3 grid, int64_t first) {
    launch_with_function(function, kernel, grid, dim3(static_cast<unsigned>(threads)), shared_bytes,
                         where.stream, arguments..., first);
  });
}

}  // namespace selfattn::cuda
