// The kernels that contain a function: finds or compiles them, and makes their arguments. Plain C++.
//
// See Note [Functions in kernels] in function_tile.cuh.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../core/options.h"

namespace selfattn::cuda {

// The options that kernels apply if they contain a function.
constexpr OptionSet kFunctionOptions = {Option::kFunction, Option::kBlockMap};

// Compiles a kernel, named as in C++ ("selfattn::cuda::simt::forward_kernel<...>"), for devices of compute
// capability major*10 + minor. Returns every form of code that CUDA may load (machine code or PTX), best
// first.
using MakeCode = std::function<std::vector<std::string>(const std::string& kernel, int capability)>;

class FunctionKernels {
 public:
  // `dims`: the most dimensions of any captured tensor, at least 1.
  FunctionKernels(MakeCode make_code, int64_t tensors, int64_t dims, int64_t numbers)
      : make_code_(std::move(make_code)), tensors_(tensors), dims_(dims), numbers_(numbers) {}

  // The bytes of the kernels' FunctionArguments: { struct { const void* data; int64_t size[dims],
  // stride[dims]; } tensors[]; double numbers[]; }. Both arrays have at least one element.
  std::vector<char> arguments_of(const ScoreFunction& function) const;

  // The kernel with the function inside that replaces `kernel` of the library on the current device. Both are
  // pointers that CUDA's runtime launches. It is compiled if it does not exist yet. Throws
  // std::runtime_error.
  const void* find(const void* kernel) const;

 private:
  const MakeCode make_code_;
  const int64_t tensors_, dims_, numbers_;

  mutable std::mutex mutex_;
  mutable std::map<std::pair<int, const void*>, const void*> found_;  // by capability and kernel
};

}  // namespace selfattn::cuda
