// What the kernels of hopper_kernels.cu share: their matrices, their memory, one product.
#pragma once

#include <cstdint>

#include "cuda/common/ptx_sm90.cuh"

namespace hopper {

using selfattn::cuda::TensorMap;
namespace ptx = selfattn::cuda::ptx;

constexpr int kGroup = 128;
constexpr int kThreads = 3 * kGroup;
// All matrices have 64 rows and 64 columns, which is one panel.
constexpr int kRows = 64;
constexpr int kPanelBytes = 64 * 128;
constexpr int kTiles = 4;
constexpr int kStages = 2;

using Results = float[kRows / 8][4];

struct Arguments {
  TensorMap map;         // kTiles matrices, one below the other
  const uint16_t* rows;  // the same matrices in memory
  float* out;            // kThreads numbers
  int* counter;
  bool right;  // whether to run without the fault
};

struct Memory {
  unsigned char* panels;  // four panels, then
  uint64_t* full;         // kStages barriers
  uint64_t* empty;        // kStages barriers
};

__device__ Memory memory_of(unsigned char* start) {
  auto* const barriers = reinterpret_cast<uint64_t*>(start + 4 * kPanelBytes);
  return {start, barriers, barriers + kStages};
}

constexpr size_t kSharedBytes = 4 * kPanelBytes + 1024;

__device__ void init_barriers(const Memory& memory, int readers) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&memory.full[stage], 1);
      ptx::barrier_init(&memory.empty[stage], readers);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
}

// Copies matrix `tile` to a panel.
__device__ void copy_tile(const Arguments& arguments, unsigned char* panel, uint64_t* barrier, int tile) {
  ptx::barrier_arrive_expecting(barrier, kPanelBytes);
  ptx::copy_box_async(panel, &arguments.map, barrier, 0, tile * kRows, 0, 0);
}

// Computes d = a b^T or d += a b^T, for 16 columns of the left operand from column 16 `step` on.
__device__ void multiply_step(Results& d, const unsigned char* a, const unsigned char* b, int step,
                              bool adds) {
  ptx::product_async<false, 64, false, false>(d, ptx::matrix_by_columns(a, kRows, 0, 16 * step),
                                              ptx::matrix_by_columns(b, kRows, 0, 16 * step), adds);
}

__device__ void multiply(Results& d, const unsigned char* a, const unsigned char* b, bool adds) {
  for (int step = 0; step < 4; ++step) multiply_step(d, a, b, step, adds || step > 0);
}

__device__ void write_out(const Arguments& arguments, const Results& d) {
  float sum = 0;
  for (int tile = 0; tile < kRows / 8; ++tile) {
    for (int r = 0; r < 4; ++r) sum += d[tile][r] * static_cast<float>(4 * tile + r + 1);
  }
  arguments.out[threadIdx.x] = sum;
}

}  // namespace hopper
