#include "operators/host_tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/function_schema.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <cstring>
#include <mutex>

namespace ptx_machine {

namespace {

// Each call advances the generator's offset by this, as one of torch's kernels would.
constexpr uint64_t kNumbersOfCall = 4;

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.numel() > 0 && other.has_storage() && one.storage().data() == other.storage().data();
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "ptx machine: a CUDA tensor that is not strided");
  const auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  if (tensor.numel() == 0 || !tensor.has_storage()) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  // The CPU tensor covers the whole storage, so that operators on views with other offsets see the same
  // memory.
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(),
                       at::DataPtr(const_cast<void*>(tensor.storage().data()), at::kCPU), nullptr, false);
  at::Tensor host = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

void copy_elements(const at::Tensor& device, const at::Tensor& host) {
  if (host.numel() == 0) return;
  int64_t last = 0;
  for (int64_t n = 0; n < host.dim(); ++n) last += (host.size(n) - 1) * host.stride(n);
  std::memcpy(device.data_ptr(), host.const_data_ptr(), static_cast<size_t>(last + 1) * host.itemsize());
}

at::Tensor HostCall::convert(const at::Tensor& tensor, bool written) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  for (Pair& pair : pairs_) {
    if (!pair.device.is_same(tensor)) continue;
    pair.written |= written;
    return pair.host;
  }
  at::Tensor host = on_host(tensor);
  if (trial_ && tensor.numel() > 0) {
    host = at::empty_strided(tensor.sizes(), tensor.strides(), host.options()).zero_();
  }
  pairs_.push_back({tensor, host, written});
  return host;
}

at::Generator HostCall::draw_from(const at::Generator* given) const {
  if (given != nullptr && given->device().is_cpu()) return *given;
  at::Generator of_device = given != nullptr ? *given : at::cuda::detail::getDefaultCUDAGenerator();
  const std::lock_guard<std::mutex> guard(of_device.mutex());
  uint64_t seed = of_device.current_seed();
  if (!captured_) {
    const uint64_t offset = of_device.get_offset();
    of_device.set_offset(offset + kNumbersOfCall);
    seed = seed * 0x9e3779b97f4a7c15ull + offset;
  }
  return at::detail::createCPUGenerator(seed);
}

void HostCall::convert(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t begin) {
  for (size_t n = 0; n < schema.arguments().size(); ++n) {
    c10::IValue& value = stack[begin + n];
    const c10::Argument& argument = schema.arguments()[n];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = convert(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor, written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::make_optional(convert(*tensor, written)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      value = at::Device(at::kCPU);
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      if (!generator.has_value() || !captured_) {
        const at::Generator given = value.isNone() ? at::Generator() : value.toGenerator();
        generator = draw_from(given.defined() ? &given : nullptr);
      }
      value = *generator;
    }
  }
}

bool HostCall::is_argument(const at::Tensor& result) const {
  for (const Pair& pair : pairs_) {
    if (pair.host.is_same(result) || share_memory(result, pair.host)) return true;
  }
  return false;
}

at::Tensor HostCall::device_of(const at::Tensor& result, NewResults* made) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (const Pair& pair : pairs_) {
    if (pair.host.is_same(result)) return pair.device;
  }
  if (result.layout() == at::kSparse) {
    const at::Tensor indices = device_of(result._indices(), made), values = device_of(result._values(), made);
    return at::_sparse_coo_tensor_unsafe(indices, values, result.sizes(),
                                         values.options().layout(at::kSparse))
        ._coalesced_(result.is_coalesced());
  }
  TORCH_CHECK(result.layout() == at::kStrided || result.layout() == at::kMkldnn,
              "ptx machine: a result that is neither strided nor sparse");
  for (const Pair& pair : pairs_) {
    if (!share_memory(result, pair.host)) continue;
    return pair.device.as_strided(result.sizes(), result.strides(), result.storage_offset());
  }
  const auto options = result.options().device(at::kCUDA, 0).requires_grad(false).pinned_memory(false);
  at::Tensor device = at::empty_strided(result.sizes(), result.strides(), options);
  made->emplace_back(device, result);
  return device;
}

void HostCall::resize_written() const {
  for (const Pair& pair : pairs_) {
    if (pair.written && pair.device.sizes() != pair.host.sizes()) pair.device.resize_(pair.host.sizes());
  }
}

void HostCall::write_back() const {
  for (const Pair& pair : pairs_) {
    if (!pair.written) continue;
    const bool same_shape = pair.host.sizes() == pair.device.sizes();
    if (pair.host.numel() == 0) {
      if (!same_shape) pair.device.resize_(pair.host.sizes());
    } else if (!same_shape || pair.host.strides() != pair.device.strides()) {
      pair.device.resize_(pair.host.sizes());
      on_host(pair.device).copy_(pair.host);
    } else if (pair.host.const_data_ptr() != pair.device.const_data_ptr()) {
      copy_elements(pair.device, pair.host);
    }
  }
}

}  // namespace ptx_machine
