// The allocation of results, and the layout that they take from an input.
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

// The same, for int32 numbers.
Output allocate_int32(const char* name, std::initializer_list<int64_t> shape, Device device);

// Does the same for a (batch, heads, rows, columns) result with the layout of `like`: if that is the
// transpose of a (batch, rows, heads, columns) tensor, the result is one, too, so that the caller's transpose
// back costs no copy; otherwise it is contiguous. With `rows_first`, batch is 1, and the tensor has the shape
// (rows, heads, columns); the view is the same.
Output allocate_like(const char* name, std::initializer_list<int64_t> shape, DType dtype, const Input& like,
                     bool rows_first = false);

// A (0,) tensor in place of a result that was not asked for.
Output allocate_nothing(DType dtype, Device device);

// Uninitialised memory for as long as an operator runs, on the device of its tensors; on the CPU it is
// aligned to 64 bytes. Throws AllocationFailure, which names it. On CUDA it comes from the framework's
// caching allocator, which reuses it only for later work of the same stream: it may be freed before the
// kernel that uses it has run.
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
