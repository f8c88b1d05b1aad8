// Matrices in panels of shared memory, for hopper_results.cu.
#pragma once

#include <cstdint>

#include "cuda/common/ptx_sm90.cuh"

namespace hopper {

using selfattn::cuda::TensorMap;
namespace ptx = selfattn::cuda::ptx;

constexpr int kThreads = 128;
constexpr int kRows = 64;
constexpr int kDepth = 128;
constexpr int kDepthOfProduct = 16;
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kAlignment = 1024;

__host__ __device__ constexpr int panels_of(int columns) {
  return (columns + kPanelColumns - 1) / kPanelColumns;
}

__device__ unsigned char* aligned(unsigned char* memory) {
  return memory + (kAlignment - reinterpret_cast<uintptr_t>(memory) % kAlignment) % kAlignment;
}

// Returns the bytes that a matrix of these rows and columns takes, in panels.
__host__ __device__ constexpr int panel_bytes(int rows, int columns) {
  return rows * panels_of(columns) * kRowBytes;
}

__device__ void copy_panels(unsigned char* shared, const TensorMap& map, uint64_t* barrier, int rows,
                            int columns) {
  for (int panel = 0; panel < panels_of(columns); ++panel) {
    ptx::copy_box_async(shared + panel * rows * kRowBytes, &map, barrier, panel * kPanelColumns, 0, 0, 0);
  }
}

}  // namespace hopper
