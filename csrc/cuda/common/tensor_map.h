// Tensor maps: TMA descriptors, with which one instruction copies a box of a tensor. Plain C++.
//
// GPUs of compute capability 9.0 copy such a box to shared memory.
#pragma once

#include <cstdint>

namespace selfattn::cuda {

// A parameter of kernels, with the bytes that CUDA's driver fills in.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// A tensor of 16-bit elements with four dimensions, the innermost first, and the box that a copy reads. The
// box has `kBoxColumns` elements in the first dimension, `box_rows` in the second, and 1 in the others.
struct TiledTensor {
  static constexpr int kBoxColumns = 64;  // 128 bytes, the span of the swizzle

  const void* data = nullptr;  // at a multiple of 16 bytes
  int64_t sizes[4] = {};       // at least 1
  int64_t strides[4] = {};     // in elements; the first is 1, the others are multiples of 8, and below 2^39
  int box_rows = 0;            // at most 256
  bool bfloat16 = false;       // else float16
};

// Makes the map of such a tensor. Elements beyond its sizes are read as zeros, and the chunks of 16 bytes
// within 128 bytes of a row are permuted by the row's number (the 128-byte swizzle). Throws
// std::runtime_error with the error of CUDA's driver.
TensorMap tensor_map(const TiledTensor& tensor);

}  // namespace selfattn::cuda
