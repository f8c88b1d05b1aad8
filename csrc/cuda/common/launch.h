// Where a launch goes. Plain C++: whoever includes this needs no CUDA headers.
#pragma once

struct CUstream_st;  // what a cudaStream_t points to

namespace selfattn::cuda {

struct Launch {
  CUstream_st* stream = nullptr;  // nullptr is CUDA's default stream
  // Device memory of as many bytes as the kernel's function for it says, 256-byte aligned; nullable when that
  // is 0.
  void* workspace = nullptr;
};

}  // namespace selfattn::cuda
