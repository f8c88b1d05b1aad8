// Host code of the programs with Hopper's instructions: tensor maps, memory, 16-bit numbers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/common/ptx_sm90.cuh"

namespace hopper {

using selfattn::cuda::TensorMap;
namespace ptx = selfattn::cuda::ptx;

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode driver_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &found));
  return reinterpret_cast<Encode>(function);
}

// A tensor of 16-bit elements, the innermost dimension first, and the box of 64 columns that is copied.
struct Tensor {
  uint16_t* data = nullptr;
  int64_t sizes[4] = {};
  int64_t strides[4] = {};  // counted in elements
};

inline TensorMap map_of(const Tensor& tensor, int box_rows, bool bfloat16) {
  TensorMap map;
  cuuint64_t sizes[4], strides[3];
  for (int n = 0; n < 4; ++n) sizes[n] = static_cast<cuuint64_t>(tensor.sizes[n]);
  for (int n = 0; n < 3; ++n) strides[n] = static_cast<cuuint64_t>(tensor.strides[n + 1]) * 2;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, ones[4] = {1, 1, 1, 1};
  const CUresult result = driver_encode()(
      reinterpret_cast<CUtensorMap*>(&map),
      bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, tensor.data, sizes,
      strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::printf("cuTensorMapEncodeTiled: %d\n", static_cast<int>(result));
    std::exit(1);
  }
  return map;
}

template <class T>
T* allocate(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}
template <class T>
T* to_device(const std::vector<T>& values) {
  T* const memory = allocate<T>(values.size());
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}
template <class T>
std::vector<T> to_host(const T* memory, size_t count) {
  std::vector<T> values(count);
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

// Integers of few bits, whose sums of products are exact in float32 and on tensor cores.
inline int small_number(uint32_t n) { return static_cast<int>((n * 2654435761u >> 13) % 9) - 4; }
inline uint16_t bits_of(int number, bool bfloat16) {
  if (number == 0) return 0;
  const uint32_t size = static_cast<uint32_t>(number < 0 ? -number : number);
  int exponent = 0;
  while (size >> (exponent + 1) != 0) ++exponent;
  const uint32_t rest = size - (1u << exponent), sign = number < 0 ? 0x8000u : 0u;
  const uint32_t bits = bfloat16 ? static_cast<uint32_t>(exponent + 127) << 7 | rest << (7 - exponent)
                                 : static_cast<uint32_t>(exponent + 15) << 10 | rest << (10 - exponent);
  return static_cast<uint16_t>(sign | bits);
}

struct Maps {
  TensorMap left, right;
};

// Makes a tensor of `rows` times `columns` small numbers.
inline Tensor matrix(int rows, int columns, bool bfloat16, uint32_t seed) {
  std::vector<uint16_t> values;
  for (int n = 0; n < rows * columns; ++n)
    values.push_back(bits_of(small_number(static_cast<uint32_t>(n) + seed), bfloat16));
  return {to_device(values), {columns, rows, 1, 1}, {1, columns, rows * columns, rows * columns}};
}
inline int number(int place, uint32_t seed) { return small_number(static_cast<uint32_t>(place) + seed); }

}  // namespace hopper
