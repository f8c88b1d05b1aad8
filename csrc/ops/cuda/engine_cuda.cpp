// The operators on CUDA tensors: the current device and stream, and the choice of a kernel.
//
// Nothing here waits for the device or reads its memory, so that CUDA graphs can capture a call.
#define USE_CUDA  // only then does the shim's header declare its functions for streams
#include "../stable.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../../core/sequences.h"
#include "../../cuda/cache/append_to_cache_cuda.h"
#include "../../cuda/cuda_kernel_table.h"
#include "../../cuda/rows/rows.h"
#include "../attention_forward.h"
#include "../engine.h"
#include "../operators.h"
#include "device_code.h"

namespace selfattn::ops {

namespace {

// Makes a device CUDA's current one until the end of a scope, and then the one that was current before.
class DeviceScope {
 public:
  explicit DeviceScope(Device device) : guard_(device.index), capability_(usable_capability(device.index)) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(device.index, &stream) != TORCH_SUCCESS) {
      throw std::runtime_error("torch has no current stream for cuda:" + std::to_string(device.index));
    }
    launch.stream = static_cast<CUstream_st*>(stream);
  }

  int capability() const { return capability_; }

  cuda::Launch launch;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int capability_;
};

const cuda::Kernel* find_kernel(const char* name) {
  int count = 0;
  const cuda::Kernel* const* kernels = cuda::all_kernels(&count);
  for (int n = 0; n < count; ++n) {
    if (std::strcmp(kernels[n]->name, name) == 0) return kernels[n];
  }
  return nullptr;
}

// Returns a kernel with a function that not every kernel has: the one asked for or chosen if it has the
// function, else "simt". `like` is the attention that the operator is a part of.
template <class Function>
const cuda::Kernel& choose_kernel_with(Function cuda::Kernel::* field, const char* name,
                                       const AttentionParams& like, int capability) {
  const cuda::Kernel* kernel = find_kernel(name);
  // Throws for an unknown name.
  if (kernel == nullptr) kernel = &cuda::choose_kernel(name, like, capability);
  const bool takes = kernel->*field != nullptr && cuda::refusal_of(*kernel, like, capability).empty();
  return takes ? *kernel : *find_kernel("simt");
}

// Returns the kernel asked for or chosen if it has statistics and their gradients, else "simt".
const cuda::Kernel& choose_for_statistics(const char* name, const AttentionParams& p, int capability) {
  const cuda::Kernel& kernel = cuda::choose_kernel(name, p, capability);
  return kernel.statistics != nullptr ? kernel : cuda::choose_kernel("simt", p, capability);
}

// Lists of selected keys have a forward and first derivatives alone.
void refuse_selection(const AttentionParams& p, const char* what) {
  if (p.selection.lists != nullptr) refuse("with selection there are no ", what);
}

void forward(const char* name, const AttentionParams& p, const ForwardOutputs& outputs, Device device) {
  DeviceScope scope(device);
  const cuda::Kernel& kernel = cuda::choose_kernel(name, p, scope.capability());
  check_selected(p, outputs);
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, outputs, [&](const AttentionParams& call, const ForwardOutputs& results) {
    const Scratch workspace("the kernel's working space", kernel.forward_workspace(call), device);
    scope.launch.workspace = workspace.data();
    kernel.forward(call, results, scope.launch);
    if (results.row_mean == nullptr) return;
    choose_for_statistics(name, p, scope.capability()).statistics(call, results, scope.launch);
  });
}

void weights(const char* name, const AttentionParams& p, const WeightsOutputs& outputs, Device device) {
  refuse_selection(p, "weights");
  const DeviceScope scope(device);
  const cuda::Kernel& kernel = cuda::choose_kernel(name, p, scope.capability());
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, outputs, [&](const AttentionParams& call, const WeightsOutputs& results) {
    if (call.keys > 0) kernel.weights(call, results, scope.launch);
  });
}

void weight_sums(const char* name, const AttentionParams& p, const WeightSums& sums, Device device) {
  refuse_selection(p, "sums of weights");
  const DeviceScope scope(device);
  const cuda::Kernel& kernel = choose_for_statistics(name, p, scope.capability());
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, sums, [&](const AttentionParams& call, const WeightSums& results) {
    if (call.keys > 0) kernel.weight_sums(call, results, scope.launch);
  });
}

void backward(const char* name, const AttentionParams& p, const BackwardArguments& arguments, Device device) {
  check_selected(p, arguments);
  DeviceScope scope(device);
  const bool of_statistics = arguments.grad_mean != nullptr || arguments.grad_keys != nullptr;
  const cuda::Kernel& kernel = of_statistics ? choose_for_statistics(name, p, scope.capability())
                                             : cuda::choose_kernel(name, p, scope.capability());
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, arguments, [&](const AttentionParams& call, const BackwardArguments& a) {
    const Scratch workspace("the backward's workspace", kernel.backward_workspace(call, a), device);
    scope.launch.workspace = workspace.data();
    kernel.backward(call, a, scope.launch);
  });
}

void captured_gradients(const char* name, const AttentionParams& p, const BackwardArguments& arguments,
                        const CapturedGradients& gradients, Device device) {
  DeviceScope scope(device);
  const cuda::Kernel& kernel =
      choose_kernel_with(&cuda::Kernel::captured_gradients, name, p, scope.capability());
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, arguments, [&](const AttentionParams& call, const BackwardArguments& a) {
    if (call.keys == 0) return;
    const Scratch workspace("the captured tensors' workspace", kernel.captured_workspace(call, gradients),
                            device);
    scope.launch.workspace = workspace.data();
    kernel.captured_gradients(call, a, gradients, scope.launch);
  });
}

void sum_of_rows(const AttentionParams& p, const void* rows, void* sums, bool shared_by_batch,
                 Device device) {
  const DeviceScope scope(device);
  cuda::rows::sum_of_rows(p, rows, sums, shared_by_batch, scope.launch);
}

// Runs a function of the kernel table that not every kernel has.
template <auto kFunction, class Params>
void run(const char* name, const Params& p, Device device) {
  const DeviceScope scope(device);
  const cuda::Kernel& chosen = choose_kernel_with(kFunction, name, attention_of(p), scope.capability());
  if (p.batch * p.heads * p.queries > 0 && p.keys > 0) (chosen.*kFunction)(p, scope.launch);
}

// Returns the kernel asked for or chosen if it has forward mode and second derivatives, else "simt".
const cuda::Kernel& choose_for_derivatives(const char* name, const AttentionParams& p, int capability) {
  const cuda::Kernel& kernel = cuda::choose_kernel(name, p, capability);
  return kernel.jvp != nullptr ? kernel : cuda::choose_kernel("simt", p, capability);
}

void jvp(const char* name, const AttentionParams& p, const JvpArguments& arguments, Device device) {
  refuse_selection(p, "forward mode");
  DeviceScope scope(device);
  const cuda::Kernel& kernel = choose_for_derivatives(name, p, scope.capability());
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, arguments, [&](const AttentionParams& call, const JvpArguments& a) {
    const Scratch workspace("the kernel's working space", kernel.forward_workspace(call), device);
    scope.launch.workspace = workspace.data();
    kernel.jvp(call, a, scope.launch);
  });
}

void backward_backward(const char* name, const AttentionParams& p, const BackwardBackwardArguments& arguments,
                       Device device) {
  refuse_selection(p, "second derivatives");
  DeviceScope scope(device);
  const cuda::Kernel& kernel = choose_for_derivatives(name, p, scope.capability());
  if (p.batch * p.heads * p.queries == 0) return;
  for_each_launch(p, arguments, [&](const AttentionParams& call, const BackwardBackwardArguments& a) {
    const Scratch workspace("the workspace of second derivatives",
                            kernel.backward_backward_workspace(call, a), device);
    scope.launch.workspace = workspace.data();
    kernel.backward_backward(call, a, scope.launch);
  });
}

void append(const AppendParams& rows, Device device) {
  const DeviceScope scope(device);
  cuda::append_to_cache(rows, scope.launch);
}

std::string refusals(const char*, const AttentionParams& p, Device device) {
  const DeviceScope scope(device);
  int count = 0;
  const cuda::Kernel* const* kernels = cuda::all_kernels(&count);
  std::string lines;
  for (int n = 0; n < count; ++n) {
    lines += (n > 0 ? "\n" : "") + cuda::refusal_of(*kernels[n], p, scope.capability());
  }
  return lines;
}

const cuda::FunctionKernels* function_kernels(cuda::MakeCode make_code, int64_t tensors, int64_t dims,
                                              int64_t numbers) {
  return new cuda::FunctionKernels(std::move(make_code), tensors, dims, numbers);
}

const CudaPart kPart = {{&forward, &weights, &weight_sums, &run<&cuda::Kernel::scores>,
                         &run<&cuda::Kernel::masked_softmax>, &backward, &sum_of_rows,
                         &run<&cuda::Kernel::scores_backward>, &run<&cuda::Kernel::masked_softmax_backward>,
                         &append, &jvp, &backward_backward, &captured_gradients, &refusals},
                        cuda_compiler(),
                        cuda_architectures(),
                        &cuda::all_kernels,
                        &cuda::refusal_of,
                        &function_kernels};
const AnnounceCudaPart kAnnounced(kPart);

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SELFATTN_NAMESPACE, CUDA, library) { implement_operators(library); }

}  // namespace selfattn::ops
