// The last step of an operator, for each kind of device: chooses a kernel and runs it.
//
// An engine gives the kernel scratch memory, and threads or a stream. The operators know no more about
// devices than this.
#pragma once

#include <string>

#include "../core/append_params.h"
#include "../core/tangents.h"
#include "../cuda/cuda_kernel_table.h"
#include "../cuda/function/function_kernels.h"
#include "checks.h"

namespace selfattn::ops {

// `kernel` is "" for the automatic choice, or a name from the kernel table of the device. Nothing runs for
// results without elements, but a wrong name is refused for them, too.
struct Engine {
  void (*forward)(const char* kernel, const AttentionParams&, const ForwardOutputs&, Device);
  void (*weights)(const char* kernel, const AttentionParams&, const WeightsOutputs&, Device);
  // Nothing runs without queries or keys.
  void (*weight_sums)(const char* kernel, const AttentionParams&, const WeightSums&, Device);
  void (*scores)(const char* kernel, const ScoresParams&, Device);
  void (*masked_softmax)(const char* kernel, const SoftmaxParams&, Device);
  // Gives the arguments their workspace. Nothing runs without queries. Without keys a kernel runs, because it
  // writes the zeros of the queries and the gradients of the sinks.
  void (*backward)(const char* kernel, const AttentionParams&, const BackwardArguments&, Device);
  // Sums grad_slopes_rows or grad_sinks_rows (batch, heads, queries), none of them 0, over the queries, and
  // over the batch if it shared the coefficient.
  void (*sum_of_rows)(const AttentionParams&, const void* rows, void* sums, bool shared_by_batch, Device);
  void (*scores_backward)(const char* kernel, const ScoresParams&, Device);
  void (*masked_softmax_backward)(const char* kernel, const SoftmaxParams&, Device);
  // Is called only if there are rows to append: no count is 0.
  void (*append)(const AppendParams&, Device);
  void (*jvp)(const char* kernel, const AttentionParams&, const JvpArguments&, Device);
  // Gives the arguments their workspace. A kernel runs if that of backward would.
  void (*backward_backward)(const char* kernel, const AttentionParams&, const BackwardBackwardArguments&,
                            Device);
  // Adds to the gradients. Is called if the function of the call has such gradients and some are wanted.
  void (*captured_gradients)(const char* kernel, const AttentionParams&, const BackwardArguments&,
                             const CapturedGradients&, Device);
  // Returns a line per kernel, best first: why it does not take the call, or nothing if it does.
  std::string (*refusals)(const char* kernel, const AttentionParams&, Device);
};

const Engine& engine_of(Device device);

// The part of the library that only a build with CUDA has. The sources in ops/cuda announce it when the
// library is loaded, so that the list of sources alone decides whether it is there.
struct CudaPart {
  Engine engine;
  const char* compiler;       // "nvcc 13.0.88"
  const char* architectures;  // "7.5, 8.0": compute capabilities with machine code
  const cuda::Kernel* const* (*all_kernels)(int* count);
  std::string (*refusal_of)(const cuda::Kernel&, const AttentionParams&, int capability);
  // The result is never destroyed.
  const cuda::FunctionKernels* (*function_kernels)(cuda::MakeCode, int64_t tensors, int64_t dims,
                                                   int64_t numbers);
};

// nullptr in a build without CUDA.
const CudaPart* cuda_part();

struct AnnounceCudaPart {
  explicit AnnounceCudaPart(const CudaPart& part);
};

}  // namespace selfattn::ops
