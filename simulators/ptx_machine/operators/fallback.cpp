// Runs torch's own operators on CUDA tensors as CPU operators on the same memory.
//
// They are registered for the key CUDA in place of torch's kernels, which have no PTX. While a stream is busy
// or captured, an operator runs once on zeros, for the shapes of its results, and is then submitted to the
// stream.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "operators/host_tensors.h"

// This is in runtime/devices.cpp.
extern "C" bool ptx_machine_is_idle(void* stream);
extern "C" void ptx_machine_submit(void* stream, std::function<void()>* work);

namespace ptx_machine {

namespace {

using torch::jit::Stack;

// These operators wait for the stream, because their results are numbers on the host, or have shapes that
// depend on what the device has computed.
const std::set<std::string> kWaiting = {"aten::_local_scalar_dense",
                                        "aten::item",
                                        "aten::equal",
                                        "aten::nonzero",
                                        "aten::masked_select",
                                        "aten::_unique2",
                                        "aten::unique_dim",
                                        "aten::unique_consecutive",
                                        "aten::is_nonzero",
                                        "aten::bincount",
                                        "aten::repeat_interleave"};

// These make memory or views, or are about the device, so torch's own implementations work here, too.
const std::set<std::string> kNative = {"aten::empty",
                                       "aten::empty_strided",
                                       "aten::resize_",
                                       "aten::set_",
                                       "aten::record_stream",
                                       "aten::is_pinned",
                                       "aten::_pin_memory",
                                       "aten::is_set_to",
                                       "aten::_efficientzerotensor",
                                       "aten::_fused_sdp_choice",
                                       "aten::_has_same_storage_numel",
                                       "aten::detach",
                                       "aten::alias"};
// site/fused_attention.py implements these.
constexpr const char* kFusedAttention[] = {"aten::_scaled_dot_product_", "aten::_efficient_attention_"};

void call_on_host(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowAutograd guard;
  op.callBoxed(stack);
}

// Runs the operator with the stack's arguments and puts its results there, on the device.
NewResults run(const c10::OperatorHandle& op, Stack& stack, size_t begin, HostCall& call, bool trial) {
  NewResults made;
  call.convert(op.schema(), stack, begin);
  Stack inner(stack.begin() + static_cast<ptrdiff_t>(begin), stack.end());
  stack.resize(begin);
  call_on_host(op, inner);
  if (trial) {
    call.resize_written();
  } else {
    call.write_back();
  }
  for (const c10::IValue& value : inner) {
    if (value.isTensor()) {
      stack.push_back(call.device_of(value.toTensor(), &made));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.device_of(tensor, &made));
      stack.push_back(list);
    } else {
      stack.push_back(value);
    }
  }
  return made;
}

// Returns what the stream does later: it runs the operator with the same arguments, and writes its new
// results to where they are expected.
std::function<void()> later(const c10::OperatorHandle& op, Stack arguments,
                            std::vector<at::Tensor> expected) {
  auto generator = std::make_shared<std::optional<at::Generator>>();
  return [op, arguments = std::move(arguments), expected = std::move(expected), generator] {
    HostCall call(/*captured=*/true, /*trial=*/false);
    call.generator = *generator;  // goes on drawing at each launch of a graph
    Stack stack = arguments;
    call.convert(op.schema(), stack, 0);
    *generator = call.generator;
    call_on_host(op, stack);
    call.write_back();
    size_t next = 0;
    const auto deliver = [&](const at::Tensor& result) {
      if (result.defined() && !call.is_argument(result)) copy_elements(expected[next++], result);
    };
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) deliver(value.toTensor());
      if (!value.isTensorList()) continue;
      for (const at::Tensor& tensor : value.toTensorVector()) deliver(tensor);
    }
  };
}

// Copies memory of the host, which the program may change as soon as the call returns.
c10::IValue kept(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  const at::Tensor& tensor = value.toTensor();
  return tensor.is_cpu() && !tensor.is_pinned() ? c10::IValue(tensor.clone()) : value;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing(stream, &status);
  return status == cudaStreamCaptureStatusActive;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (!ptx_machine_is_idle(stream)) {
    const bool to_host = schema.name() == "aten::copy_" && !(*stack)[begin].toTensor().is_cuda();
    if (!to_host && kWaiting.count(schema.name()) == 0) {
      Stack arguments;
      for (size_t n = begin; n < stack->size(); ++n) arguments.push_back(kept((*stack)[n]));
      HostCall trial(/*captured=*/true, /*trial=*/true);
      std::vector<at::Tensor> expected;
      for (const auto& [device, host] : run(op, *stack, begin, trial, true)) expected.push_back(device);
      std::function<void()> work = later(op, std::move(arguments), std::move(expected));
      ptx_machine_submit(stream, &work);
      return;
    }
    TORCH_CHECK(!is_capturing(stream), "ptx machine: ", schema.name(),
                " is not permitted when a stream is capturing");
    cudaStreamSynchronize(stream);
  }
  HostCall call(/*captured=*/false, /*trial=*/false);
  for (const auto& [device, host] : run(op, *stack, begin, call, false)) copy_elements(device, host);
}

// Runs operators on nested tensors with padding: torch composes them of other operators on the CPU, where it
// has a kernel on CUDA.
void as_of_nested_on_host(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::NestedTensorCPU), stack);
}

bool is_replaced(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0 || kNative.count(name.name) != 0) return false;
  for (const char* fused : kFusedAttention) {
    if (name.name.rfind(fused, 0) == 0) return false;
  }
  const auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op.has_value() || !op->hasSchema()) return false;
  if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && name.name != "aten::copy_") return false;
  for (const c10::Argument& result : op->schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;  // it is a view
  }
  return true;
}

torch::Library* replace_operators() {
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!is_replaced(name)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return library;
}

torch::Library* replace_operators_of_nested_tensors() {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::NestedTensorCUDA,
                                     __FILE__, __LINE__);
  library->impl("to_padded_tensor", torch::CppFunction::makeFromBoxedFunction<&as_of_nested_on_host>());
  return library;
}

// The operators are registered as the library is loaded, for the rest of the process.
torch::Library* const libraries[] = {replace_operators(), replace_operators_of_nested_tensors()};

}  // namespace

}  // namespace ptx_machine
