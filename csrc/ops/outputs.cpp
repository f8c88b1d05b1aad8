// Allocates results and scratch memory.
#include "outputs.h"

#include <cstring>
#include <new>

namespace selfattn::ops {

namespace {

constexpr std::align_val_t kHostAlignment{64};

bool is_heads_inside(const Input& like) {
  return like.size[1] > 1 && like.size[2] > 1 && like.stride[1] != 0 && like.stride[1] < like.stride[2];
}

TensorHandle empty_strided(const char* name, const int64_t* size, const int64_t* stride, int64_t rank,
                           int32_t dtype_code, size_t bytes, Device device) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, size, stride, dtype_code, device.type, device.index, &handle) !=
      TORCH_SUCCESS) {
    throw AllocationFailure(std::string("not enough memory for ") + name + " of shape " +
                            shape_text(size, rank) + " (" + std::to_string(bytes) + " bytes)");
  }
  return TensorHandle(handle);
}

// A dtype in the framework's numbers, and the bytes of an element.
struct Elements {
  int32_t code;
  int64_t bytes;
};
Elements elements_of(DType dtype) { return {code_of(dtype), size_of(dtype)}; }

Output allocate_strided(const char* name, std::initializer_list<int64_t> shape, Elements elements,
                        Device device, bool heads_inside, bool rows_first = false) {
  const int64_t* size = shape.begin();
  const int64_t rank = static_cast<int64_t>(shape.size());
  // Strides are set from the innermost dimension outwards; the heads-inside order swaps dimensions 1 and 2.
  constexpr int kSwapped[kMaxRank] = {3, 1, 2, 0};
  Output output;
  int64_t next = 1;
  bool empty = false;
  for (int64_t n = 0; n < rank; ++n) {
    const int64_t d = heads_inside ? kSwapped[n] : rank - 1 - n;
    output.stride[d] = next;
    empty |= size[d] == 0;
    if (__builtin_mul_overflow(next, size[d] > 0 ? size[d] : 1, &next)) {
      refuse(name, " would have the shape ", shape_text(size, rank),
             ", more elements than memory can address");
    }
  }
  if (__builtin_mul_overflow(next, elements.bytes, &next)) {
    refuse(name, " would have the shape ", shape_text(size, rank), ", more bytes than memory can address");
  }
  output.bytes = empty ? 0 : static_cast<size_t>(next);
  output.device = device;

  const int64_t* stride = output.stride;
  if (rows_first) {
    const int64_t sizes[] = {size[2], size[1], size[3]}, strides[] = {stride[2], stride[1], stride[3]};
    output.handle = empty_strided(name, sizes, strides, 3, elements.code, output.bytes, device);
  } else {
    output.handle = empty_strided(name, size, stride, rank, elements.code, output.bytes, device);
  }
  torch_get_mutable_data_ptr(output.handle.get(), &output.data);
  return output;
}

}  // namespace

View Output::view(DType dtype) const {
  return View{data, dtype, {stride[0], stride[1], stride[2], stride[3]}};
}

void Output::fill_zero() const {
  if (bytes == 0) return;
  if (device.type == aoti_torch_device_type_cpu()) {
    std::memset(data, 0, bytes);
  } else if (aoti_torch_zero_(handle.get()) != TORCH_SUCCESS) {
    throw std::runtime_error("torch could not fill a result with zeros");
  }
}

Output allocate(const char* name, std::initializer_list<int64_t> shape, DType dtype, Device device) {
  return allocate_strided(name, shape, elements_of(dtype), device, false);
}

Output allocate_int32(const char* name, std::initializer_list<int64_t> shape, Device device) {
  return allocate_strided(name, shape, {dtype_codes().int32, sizeof(int32_t)}, device, false);
}

Output allocate_like(const char* name, std::initializer_list<int64_t> shape, DType dtype, const Input& like,
                     bool rows_first) {
  return allocate_strided(name, shape, elements_of(dtype), like.device, is_heads_inside(like), rows_first);
}

Output allocate_nothing(DType dtype, Device device) {
  return allocate_strided("an unused result", {0}, elements_of(dtype), device, false);
}

void Scratch::FreeHost::operator()(char* memory) const { ::operator delete(memory, kHostAlignment); }

Scratch::Scratch(const char* name, size_t bytes, Device device) {
  if (bytes == 0) return;
  if (device.type == aoti_torch_device_type_cpu()) {
    try {
      host_.reset(static_cast<char*>(::operator new(bytes, kHostAlignment)));
    } catch (const std::bad_alloc&) {
      throw AllocationFailure(std::string("not enough memory for ") + name + " (" + std::to_string(bytes) +
                              " bytes)");
    }
    data_ = host_.get();
    return;
  }
  const auto size = static_cast<int64_t>(bytes);
  const int64_t stride = 1;
  tensor_ = empty_strided(name, &size, &stride, 1, aoti_torch_dtype_uint8(), bytes, device);
  void* data = nullptr;
  torch_get_mutable_data_ptr(tensor_.get(), &data);
  data_ = static_cast<char*>(data);
}

}  // namespace selfattn::ops
