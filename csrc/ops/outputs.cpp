#include "outputs.h"

#include <cstring>

namespace selfattn::ops {

namespace {

bool is_heads_inside(const Input& like) {
  return like.size[1] > 1 && like.size[2] > 1 && like.stride[1] != 0 && like.stride[1] < like.stride[2];
}

Output allocate_strided(const char* name, std::initializer_list<int64_t> shape, DType dtype,
                        bool heads_inside) {
  const int64_t* size = shape.begin();
  const int64_t rank = static_cast<int64_t>(shape.size());
  // From the innermost dimension outwards; the heads-inside order swaps dimensions 1 and 2.
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
  if (__builtin_mul_overflow(next, size_of(dtype), &next)) {
    refuse(name, " would have the shape ", shape_text(size, rank), ", more bytes than memory can address");
  }
  output.bytes = empty ? 0 : static_cast<size_t>(next);

  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, size, output.stride, code_of(dtype), aoti_torch_device_type_cpu(), 0,
                               &handle) != TORCH_SUCCESS) {
    throw AllocationFailure(std::string("not enough memory for ") + name + " of shape " +
                            shape_text(size, rank) + " (" + std::to_string(output.bytes) + " bytes)");
  }
  output.handle = TensorHandle(handle);
  torch_get_mutable_data_ptr(handle, &output.data);
  return output;
}

}  // namespace

View Output::view(DType dtype) const {
  return View{data, dtype, {stride[0], stride[1], stride[2], stride[3]}};
}

void Output::fill_zero() const {
  if (bytes > 0) std::memset(data, 0, bytes);
}

Output allocate(const char* name, std::initializer_list<int64_t> shape, DType dtype) {
  return allocate_strided(name, shape, dtype, false);
}

Output allocate_like(const char* name, std::initializer_list<int64_t> shape, DType dtype, const Input& like) {
  return allocate_strided(name, shape, dtype, is_heads_inside(like));
}

Output allocate_nothing(DType dtype) { return allocate_strided("an unused result", {0}, dtype, false); }

}  // namespace selfattn::ops
