// Boxed calls without copies: reads arguments from the dispatcher's stack and puts results back.
//
// Arguments are read in the order of the schema. TORCH_BOX would do the same through std::tuple,
// std::optional and std::string, with a heap allocation for each, which a call on a tiny input would notice.
// Reading takes ownership, so an op reads all of its arguments before it checks the first one: an exception
// in between would leak the rest.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stable.h"

namespace selfattn::ops {

// Owns one reference to a tensor, or none.
class TensorHandle {
 public:
  TensorHandle() = default;
  explicit TensorHandle(AtenTensorHandle handle) : handle_(handle) {}
  TensorHandle(TensorHandle&& other) noexcept : handle_(other.release()) {}
  TensorHandle& operator=(TensorHandle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~TensorHandle() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  explicit operator bool() const { return handle_ != nullptr; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// A name that a caller gave, copied out of the dispatcher's string. Longer names are cut, and stay unknown,
// because no known name is so long.
struct Name {
  char text[32] = "";
};

class Stack {
 public:
  explicit Stack(StableIValue* values) : values_(values) {}

  TensorHandle tensor() { return TensorHandle(next<AtenTensorHandle>()); }
  TensorHandle optional_tensor() {
    return TensorHandle(next<std::optional<AtenTensorHandle>>().value_or(nullptr));
  }
  double number() { return next<double>(); }
  std::optional<double> optional_number() { return next<std::optional<double>>(); }
  int64_t integer() { return next<int64_t>(); }
  std::vector<int64_t> integers() { return next<std::vector<int64_t>>(); }
  std::optional<std::vector<int64_t>> optional_integers() {
    return next<std::optional<std::vector<int64_t>>>();
  }
  std::optional<std::vector<double>> optional_numbers() { return next<std::optional<std::vector<double>>>(); }
  // The vector is empty if the argument is None.
  std::vector<TensorHandle> optional_tensors() {
    std::vector<TensorHandle> tensors;
    const auto handles = next<std::optional<std::vector<AtenTensorHandle>>>();
    if (!handles) return tensors;
    tensors.reserve(handles->size());
    for (const AtenTensorHandle handle : *handles) tensors.emplace_back(handle);
    return tensors;
  }
  bool flag() { return next<bool>(); }

  Name name() { return text_of(next<StringHandle>()); }
  std::optional<Name> optional_name() {
    const auto string = next<std::optional<StringHandle>>();
    return string ? std::optional<Name>(text_of(*string)) : std::nullopt;
  }

  // Results overwrite the arguments from the start of the stack.
  template <class... Results>
  void put(Results&... results) {
    int64_t index = 0;
    ((values_[index++] = torch::stable::detail::from(results.release())), ...);
  }
  void put_text(const std::string& text) { values_[0] = torch::stable::detail::from(text); }

 private:
  // Deletes the string.
  static Name text_of(StringHandle string) {
    Name name;
    size_t length = 0;
    const char* text = nullptr;
    if (torch_string_length(string, &length) == TORCH_SUCCESS && length > 0 &&
        torch_string_c_str(string, &text) == TORCH_SUCCESS) {
      std::memcpy(name.text, text, length < sizeof(name.text) ? length : sizeof(name.text) - 1);
    }
    torch_delete_string(string);
    return name;
  }

  template <class T>
  T next() {
    return torch::stable::detail::to<T>(values_[index_++]);
  }

  StableIValue* values_;
  int64_t index_ = 0;
};

}  // namespace selfattn::ops
