// Results: allocation, and the layout that they take from an input.
#pragma once

#include <initializer_list>
#include <memory>

#include "checks.h"

namespace selfattn::ops {

// A tensor that an op returns. The view is valid for four dimensions only.
struct Output {
  TensorHandle handle;
  void* data = nullptr;
  int64_t stride[kMaxRank] = {0, 0, 0, 0};
  size_t bytes = 0;
  Device device;

  View view(DType dtype) const;
  void fill_zero() const;
};

// Uninitialised and contiguous. Throws AllocationFailure, or refuses a shape whose element count overflows.
Output allocate(const char* name, std::initializer_list<int64_t> shape, DType dtype, Device device);

// As allocate(), for a (batch, heads, rows, columns) result that follows the layout of `like`: where that is
// the transpose of a (batch, rows, heads, columns) tensor the result is one too, so that the caller's
// transpose back costs no copy; else contiguous.
Output allocate_like(const char* name, std::initializer_list<int64_t> shape, DType dtype, const Input& like);

// The (0,) tensor that stands for a result nobody asked for.
Output allocate_nothing(DType dtype, Device device);

// Uninitialised memory for as long as an operator runs, on the device of its tensors; on the CPU 64-byte
// aligned. Throws AllocationFailure, which names it. On CUDA it comes from
// the framework's caching allocator, which hands it to later work of the same stream alone: it may be given
// back before the kernel that uses it has run.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const char* name, size_t bytes, Device device);
  char* data() const { return data_; }

 private:
  struct FreeHost {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, FreeHost> host_;
  TensorHandle tensor_;
  char* data_ = nullptr;
};

}  // namespace selfattn::ops
