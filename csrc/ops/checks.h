// Checks of the tensors that an op was given, and refusals of wrong ones.
//
// No checks follow these: whatever a caller passes, no kernel reads or writes outside its tensors. A refusal
// is std::invalid_argument, which Python sees as ValueError. Its text names the argument, what was given and
// what is allowed, and is written only once something is wrong.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../core/attention_params.h"
#include "boxing.h"

namespace selfattn::ops {

// Appends what a refusal says. It takes no stream: where a compiler links its own copy of the C++ library
// into this one, as on systems that have no other, streams of two copies share the numbers by which they find
// how to print integers, and crash.
inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
inline void append(std::string& text, double part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", part);
  text += digits;
}
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
void append(std::string& text, Integer part) {
  text += std::to_string(part);
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  throw std::invalid_argument(text);
}

// Python sees it as MemoryError.
class AllocationFailure : public std::bad_alloc {
 public:
  explicit AllocationFailure(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// The framework's numbers for the dtypes that the ops accept; they are not constants of its ABI.
struct DTypeCodes {
  int32_t float64, float32, bfloat16, float16, boolean, int32, int64;
};
const DTypeCodes& dtype_codes();
int32_t code_of(DType dtype);

constexpr int kMaxRank = 4;

// The device of a tensor, in the framework's numbers.
struct Device {
  int32_t type = 0;
  int32_t index = 0;
};
// Whether the CPU can read the memory of tensors on this device.
bool on_host(Device device);

// The properties of one argument, asked from the framework once. Borrows from the handle.
struct Input {
  const char* name = "";
  Device device;
  int64_t rank = 0;
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;
  int32_t dtype_code = 0;
  const void* data = nullptr;
  int64_t bytes = 0;  // from its first element to the end of its last; 0 without elements
};

// The sizes and strides of packed rows (rows, heads, dim), seen as (1, heads, rows, dim).
struct HeadsFirst {
  int64_t size[kMaxRank], stride[kMaxRank];

  // Returns the argument seen that way, which borrows from this structure.
  Input of(Input rows);
};

Input inspect(const char* name, const TensorHandle& handle);
// The same for a later argument, which must be on the device of the first.
Input inspect(const char* name, const TensorHandle& handle, const Input& first);

// "(2, 8, 16, 64)"
std::string shape_text(const int64_t* size, int64_t rank);

// The name as Python spells it.
const char* dtype_text(int32_t code);

void check_rank(const Input& input, int64_t rank);
void check_shape(const Input& input, std::initializer_list<int64_t> shape);
// The last dimension must be dense because kernels load it as vectors.
void check_last_stride(const Input& input);
// float64, float32, bfloat16 or float16, else a refusal.
DType float_dtype(const Input& input);
void check_dtype(const Input& input, DType dtype);
// A view for a kernel; dimensions of size 1 get stride 0, so that they broadcast.
View broadcast_view(const Input& input, DType dtype);
View plain_view(const Input& input, DType dtype);

bool has_unit_last_stride(const Input& input);
bool is_contiguous(const Input& input);
// Replaces the tensor by a contiguous copy and looks at it again.
void make_contiguous(TensorHandle& handle, Input& input);
// Replaces the tensor by a copy, which keeps its layout if that is dense.
void make_copy(TensorHandle& handle, Input& input);

inline DType accumulation_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace selfattn::ops
