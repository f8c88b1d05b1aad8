// A device cuda:0 in the host's memory, for csrc/ops/cuda with a torch for CPUs. The library's calls to the
// framework that need a GPU come to the functions __wrap_* here, by the linker's option --wrap. Two
// operators, to_device and to_host, make a tensor of one device from a tensor of the other, on the same
// memory. The framework itself can only ask such a tensor what it is.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/csrc/stable/c/shim.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstring>
#include <stdexcept>

#include "ops/cuda/device_code.h"

namespace {

int guards = 0;  // how many guards set the current device

}  // namespace

namespace selfattn::ops {

const char* cuda_compiler() { return "the host's compiler"; }
const char* cuda_architectures() { return "the PTX machine's"; }
int usable_capability(int) {
  if (guards == 0) throw std::logic_error("the device was asked for before it was the current one");
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  return 10 * major + minor;
}

}  // namespace selfattn::ops

namespace {

// Makes a tensor of the same layout on another device, with the same memory.
at::Tensor seen_from(const at::Tensor& tensor, c10::Device device, c10::DispatchKey key) {
  c10::DataPtr data(
      tensor.storage().mutable_data(), new at::Tensor(tensor),
      [](void* owner) { delete static_cast<at::Tensor*>(owner); }, device);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false));
  at::Tensor other =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  other.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  return other;
}

at::Tensor to_device(const at::Tensor& tensor) {
  return seen_from(tensor, c10::Device(c10::kCUDA, 0), c10::DispatchKey::CUDA);
}
at::Tensor to_host(const at::Tensor& tensor) { return seen_from(tensor, c10::kCPU, c10::DispatchKey::CPU); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(SELFATTN_NAMESPACE, library) {
  library.def("to_device(Tensor tensor) -> Tensor");
  library.def("to_host(Tensor tensor) -> Tensor");
}
TORCH_LIBRARY_IMPL(SELFATTN_NAMESPACE, CPU, library) { library.impl("to_device", &to_device); }
TORCH_LIBRARY_IMPL(SELFATTN_NAMESPACE, CUDA, library) { library.impl("to_host", &to_host); }

extern "C" {

AOTITorchError __wrap_aoti_torch_empty_strided(int64_t rank, const int64_t* size, const int64_t* stride,
                                               int32_t dtype, int32_t device_type, int32_t,
                                               AtenTensorHandle* result) {
  const c10::IntArrayRef sizes(size, static_cast<size_t>(rank)), strides(stride, static_cast<size_t>(rank));
  at::Tensor tensor = at::empty_strided(sizes, strides, static_cast<at::ScalarType>(dtype));
  if (device_type != aoti_torch_device_type_cpu()) tensor = to_device(tensor);
  *result = torch::aot_inductor::new_tensor_handle(std::move(tensor));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_zero_(AtenTensorHandle handle) {
  const at::Tensor& tensor = *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
  std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  ++guards;
  *guard = reinterpret_cast<DeviceGuardHandle>(&guards);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  if (guard != nullptr) --guards;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __real_torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);

// Makes dense copies, for which the operators call the framework.
AOTITorchError __wrap_torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                            uint64_t version) {
  AtenTensorHandle given;
  std::memcpy(&given, stack, sizeof given);
  at::Tensor& tensor = *torch::aot_inductor::tensor_handle_to_tensor_pointer(given);
  const bool is_on_device = tensor.device().type() == c10::kCUDA;
  if (is_on_device) tensor = to_host(tensor);
  const AOTITorchError error = __real_torch_call_dispatcher(name, overload, stack, version);
  if (error != AOTI_TORCH_SUCCESS || !is_on_device) return error;
  std::memcpy(&given, stack, sizeof given);
  at::Tensor& result = *torch::aot_inductor::tensor_handle_to_tensor_pointer(given);
  result = to_device(result);
  return error;
}

}  // extern "C"
