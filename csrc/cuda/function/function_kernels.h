// The kernels that have a function inside (Note [Functions in kernels] in function_tile.cuh): which have been
// compiled, and what they are launched with. Plain C++.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../core/options.h"

namespace selfattn::cuda {

// What kernels that are launched with functions apply.
#if defined(SELFATTN_CUDA_EMULATOR)  // compiles kernels once
constexpr OptionSet kFunctionOptions;
#else
constexpr OptionSet kFunctionOptions = {Option::kFunction, Option::kBlockMap};
#endif

// Makes code of a kernel, named as in C++ ("selfattn::cuda::simt::forward_kernel<...>"), for devices of
// compute capability major*10 + minor: all there is, best first, as CUDA loads it (machine code or PTX).
using MakeCode = std::function<std::vector<std::string>(const std::string& kernel, int capability)>;

class FunctionKernels {
 public:
  // `dims`: the most dimensions of any captured tensor, at least 1.
  FunctionKernels(MakeCode make_code, int64_t tensors, int64_t dims, int64_t numbers)
      : make_code_(std::move(make_code)), tensors_(tensors), dims_(dims), numbers_(numbers) {}

  // FunctionArguments as the kernels have it: { struct { const void* data; int64_t size[dims], stride[dims];
  // } tensors[]; double numbers[]; }, both of one element at least.
  std::vector<char> arguments_of(const ScoreFunction& function) const;

  // That of the current device which stands for a kernel of the library, both as CUDA's runtime launches
  // them. It is made where there is none yet. Throws std::runtime_error.
  const void* find(const void* kernel) const;

 private:
  const MakeCode make_code_;
  const int64_t tensors_, dims_, numbers_;

  mutable std::mutex mutex_;
  mutable std::map<std::pair<int, const void*>, const void*> found_;  // by capability and kernel
};

}  // namespace selfattn::cuda
