// Inspects and checks the tensors that an op was given.
#include "checks.h"

#include <torch/csrc/stable/ops.h>

namespace selfattn::ops {

const DTypeCodes& dtype_codes() {
  static const DTypeCodes codes = {aoti_torch_dtype_float64(),  aoti_torch_dtype_float32(),
                                   aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(),
                                   aoti_torch_dtype_bool(),     aoti_torch_dtype_int32(),
                                   aoti_torch_dtype_int64()};
  return codes;
}

int32_t code_of(DType dtype) {
  const DTypeCodes& codes = dtype_codes();
  switch (dtype) {
    case DType::kFloat64:
      return codes.float64;
    case DType::kFloat32:
      return codes.float32;
    case DType::kBFloat16:
      return codes.bfloat16;
    case DType::kFloat16:
      return codes.float16;
    case DType::kBool:
      return codes.boolean;
  }
  return codes.float32;
}

namespace {

// "cuda:0", as Python spells it.
std::string device_text(Device device) {
  const struct {
    int32_t type;
    const char* name;
  } known[] = {{aoti_torch_device_type_cuda(), "cuda"},
               {aoti_torch_device_type_meta(), "meta"},
               {aoti_torch_device_type_xpu(), "xpu"},
               {aoti_torch_device_type_mps(), "mps"}};
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  for (const auto& other : known) {
    if (device.type == other.type) return std::string(other.name) + ":" + std::to_string(device.index);
  }
  return "another device";
}

}  // namespace

bool on_host(Device device) { return device.type == aoti_torch_device_type_cpu(); }

Input HeadsFirst::of(Input rows) {
  check_rank(rows, 3);
  constexpr int kFrom[kMaxRank] = {0, 1, 0, 2};
  for (int d = 0; d < kMaxRank; ++d) {
    size[d] = d == 0 ? 1 : rows.size[kFrom[d]];
    stride[d] = d == 0 ? 0 : rows.stride[kFrom[d]];
  }
  rows.rank = kMaxRank;
  rows.size = size;
  rows.stride = stride;
  return rows;
}

Input inspect(const char* name, const TensorHandle& handle) {
  Input input;
  input.name = name;
  int64_t* size = nullptr;
  int64_t* stride = nullptr;
  int64_t offset = 0, storage_bytes = 0;
  if (aoti_torch_get_dim(handle.get(), &input.rank) != TORCH_SUCCESS ||
      aoti_torch_get_sizes(handle.get(), &size) != TORCH_SUCCESS ||
      aoti_torch_get_strides(handle.get(), &stride) != TORCH_SUCCESS ||
      aoti_torch_get_dtype(handle.get(), &input.dtype_code) != TORCH_SUCCESS ||
      aoti_torch_get_device_type(handle.get(), &input.device.type) != TORCH_SUCCESS ||
      aoti_torch_get_device_index(handle.get(), &input.device.index) != TORCH_SUCCESS ||
      aoti_torch_get_storage_offset(handle.get(), &offset) != TORCH_SUCCESS ||
      aoti_torch_get_storage_size(handle.get(), &storage_bytes) != TORCH_SUCCESS ||
      torch_get_const_data_ptr(handle.get(), &input.data) != TORCH_SUCCESS) {
    refuse(name, " must be a dense tensor");
  }
  input.size = size;
  input.stride = stride;

  // A storage can be shrunk under its tensors (untyped_storage().resize_, as sharded training does).
  int64_t last = offset;
  bool empty = false;
  for (int64_t d = 0; d < input.rank; ++d) {
    empty |= size[d] == 0;
    last += (size[d] - 1) * stride[d];
  }
  const auto item = static_cast<int64_t>(aoti_torch_dtype_element_size(input.dtype_code));
  if (empty) return input;
  if ((last + 1) * item > storage_bytes) {
    refuse(name, " of shape ", shape_text(size, input.rank), " reaches beyond its storage of ", storage_bytes,
           " bytes");
  }
  input.bytes = (last + 1 - offset) * item;
  return input;
}

Input inspect(const char* name, const TensorHandle& handle, const Input& first) {
  const Input input = inspect(name, handle);
  // The index must agree, too: a pointer of one GPU means nothing on another.
  if (input.device.type != first.device.type || input.device.index != first.device.index) {
    refuse(name, " is on ", device_text(input.device), " and ", first.name, " on ", device_text(first.device),
           ": all tensors must be on one device");
  }
  return input;
}

std::string shape_text(const int64_t* size, int64_t rank) {
  std::string text = "(";
  for (int64_t d = 0; d < rank; ++d) text += (d > 0 ? ", " : "") + std::to_string(size[d]);
  return text + (rank == 1 ? ",)" : ")");
}

const char* dtype_text(int32_t code) {
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kBool}) {
    if (code == code_of(dtype)) return name_of(dtype);
  }
  const struct {
    int32_t code;
    const char* name;
  } others[] = {{aoti_torch_dtype_int64(), "int64"},         {aoti_torch_dtype_int32(), "int32"},
                {aoti_torch_dtype_int16(), "int16"},         {aoti_torch_dtype_int8(), "int8"},
                {aoti_torch_dtype_uint8(), "uint8"},         {aoti_torch_dtype_complex32(), "complex32"},
                {aoti_torch_dtype_complex64(), "complex64"}, {aoti_torch_dtype_complex128(), "complex128"}};
  for (const auto& other : others) {
    if (code == other.code) return other.name;
  }
  return "an unknown dtype";
}

void check_rank(const Input& input, int64_t rank) {
  if (input.rank != rank) {
    refuse(input.name, " must have ", rank, " dimensions, but its shape is ",
           shape_text(input.size, input.rank));
  }
}

void check_shape(const Input& input, std::initializer_list<int64_t> shape) {
  bool same = input.rank == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; same && d < input.rank; ++d) same = input.size[d] == shape.begin()[d];
  if (!same) {
    refuse(input.name, " must have the shape ", shape_text(shape.begin(), static_cast<int64_t>(shape.size())),
           ", but its shape is ", shape_text(input.size, input.rank));
  }
}

bool has_unit_last_stride(const Input& input) {
  if (input.stride[input.rank - 1] == 1 || input.size[input.rank - 1] <= 1) return true;
  // Kernels do not read a tensor without elements, and torch calls it contiguous whatever its strides are.
  for (int64_t d = 0; d < input.rank; ++d) {
    if (input.size[d] == 0) return true;
  }
  return false;
}

void check_last_stride(const Input& input) {
  if (!has_unit_last_stride(input)) {
    refuse(input.name, " must be dense in its last dimension (stride 1), but its strides are ",
           shape_text(input.stride, input.rank));
  }
}

DType float_dtype(const Input& input) {
  const DTypeCodes& codes = dtype_codes();
  if (input.dtype_code == codes.float32) return DType::kFloat32;
  if (input.dtype_code == codes.bfloat16) return DType::kBFloat16;
  if (input.dtype_code == codes.float16) return DType::kFloat16;
  if (input.dtype_code != codes.float64) {
    refuse(input.name, " must be float64, float32, bfloat16 or float16, but it is ",
           dtype_text(input.dtype_code));
  }
  return DType::kFloat64;
}

void check_dtype(const Input& input, DType dtype) {
  if (input.dtype_code == code_of(dtype)) return;
  refuse(input.name, " must be ", name_of(dtype), " to go with the query, but it is ",
         dtype_text(input.dtype_code));
}

View plain_view(const Input& input, DType dtype) {
  View view;
  view.data = const_cast<void*>(input.data);
  view.dtype = dtype;
  for (int64_t d = 0; d < kMaxRank; ++d) view.stride[d] = input.stride[d];
  return view;
}

View broadcast_view(const Input& input, DType dtype) {
  View view = plain_view(input, dtype);
  for (int64_t d = 0; d < kMaxRank; ++d) {
    if (input.size[d] == 1) view.stride[d] = 0;
  }
  return view;
}

bool is_contiguous(const Input& input) {
  int64_t expected = 1;
  for (int64_t d = input.rank - 1; d >= 0; --d) {
    if (input.size[d] == 0) return true;
    if (input.size[d] != 1 && input.stride[d] != expected) return false;
    expected *= input.size[d];
  }
  return true;
}

namespace {

AllocationFailure no_memory_for(const char* kind, const Input& input) {
  size_t bytes = aoti_torch_dtype_element_size(input.dtype_code);
  bool overflow = false;
  for (int64_t d = 0; d < input.rank; ++d) {
    overflow = __builtin_mul_overflow(bytes, static_cast<size_t>(input.size[d]), &bytes) || overflow;
  }
  if (overflow) {
    refuse(input.name, " of shape ", shape_text(input.size, input.rank),
           " has more elements than memory can address");
  }
  return AllocationFailure(std::string("not enough memory for ") + kind + " of " + input.name + " (" +
                           std::to_string(bytes) + " bytes)");
}

}  // namespace

void make_contiguous(TensorHandle& handle, Input& input) {
  const auto failure = [&input] { return no_memory_for("a contiguous copy", input); };
  const torch::stable::Tensor given(handle.release());
  AtenTensorHandle copy = nullptr;
  try {
    const torch::stable::Tensor dense = torch::stable::contiguous(given);
    if (aoti_torch_new_tensor_handle(dense.get(), &copy) != TORCH_SUCCESS) throw failure();
  } catch (const std::runtime_error&) {
    // The error's text is only the name of the function that failed; Python asks the framework for the
    // reason.
    throw failure();
  }
  handle = TensorHandle(copy);
  input = inspect(input.name, handle);
}

void make_copy(TensorHandle& handle, Input& input) {
  AtenTensorHandle copy = nullptr;
  if (aoti_torch_clone(handle.get(), &copy) != TORCH_SUCCESS) throw no_memory_for("a copy", input);
  handle = TensorHandle(copy);
  input = inspect(input.name, handle);
}

}  // namespace selfattn::ops
