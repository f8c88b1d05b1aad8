// Tensor maps: what a GPU of compute capability 9.0 is told of a tensor, so that one instruction copies a box
// of it to shared memory. Plain C++.
#pragma once

#include <cstdint>

namespace selfattn::cuda {

// As CUDA's driver makes it, a parameter of kernels.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// A tensor of 16-bit elements of four dimensions, the innermost first, and the box that is copied at a time.
// The box is `kBoxColumns` wide in the first dimension, `box_rows` high in the second, and 1 in the others.
struct TiledTensor {
  static constexpr int kBoxColumns = 64;  // 128 bytes, the span of the swizzle

  const void* data = nullptr;  // at a multiple of 16 bytes
  int64_t sizes[4] = {};       // at least 1
  int64_t strides[4] = {};     // in elements; the first is 1, the others are multiples of 8, and below 2^39
  int box_rows = 0;            // at most 256
  bool bfloat16 = false;       // else float16
};

// The map of such a tensor: elements beyond its sizes are read as zeros, and chunks of 16 bytes change places
// within 128 bytes of a row by the row's number (the 128-byte swizzle). Throws std::runtime_error with what
// CUDA's driver says against it.
TensorMap tensor_map(const TiledTensor& tensor);

}  // namespace selfattn::cuda
