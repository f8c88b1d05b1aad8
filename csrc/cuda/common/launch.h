// The stream and the workspace of a launch. Plain C++, which needs no CUDA headers.
#pragma once

struct CUstream_st;  // what a cudaStream_t points to

namespace selfattn::cuda {

struct Launch {
  CUstream_st* stream = nullptr;  // nullptr is CUDA's default stream
  // Device memory, 256-byte aligned, of the size that the kernel's workspace function returns; nullable if
  // that is 0.
  void* workspace = nullptr;
};

}  // namespace selfattn::cuda
