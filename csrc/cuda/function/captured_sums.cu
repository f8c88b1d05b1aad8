// Clears the copies of captured tensors' gradients, and adds them up.
#include "captured_sums.h"

#include "../common/grid.cuh"

namespace selfattn::cuda {

namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads, 8)
    clear_copies_kernel(double* memory, int64_t count, const int64_t first_block) {
  const int64_t n = (first_block + blockIdx.x) * kThreads + threadIdx.x;
  if (n < count) memory[n] = 0.0;
}

__global__ void __launch_bounds__(kThreads, 8)
    join_copies_kernel(double* result, int64_t size, const double* others, int64_t count,
                       const int64_t first_block) {
  const int64_t n = (first_block + blockIdx.x) * kThreads + threadIdx.x;
  if (n >= size) return;
  double sum = result[n];
  for (int64_t copy = 0; copy < count; ++copy) sum += others[copy * size + n];
  result[n] = sum;
}

}  // namespace

void clear_copies(const CapturedSums& sums, const Launch& where) {
  launch_blocks(&clear_copies_kernel, divide_up(sums.size_of_others(), kThreads), kThreads, 0, where,
                sums.others, sums.size_of_others());
}

void join_copies(const CapturedSums& sums, const Launch& where) {
  if (sums.copies == 1) return;
  launch_blocks(&join_copies_kernel, divide_up(sums.size, kThreads), kThreads, 0, where, sums.result,
                sums.size, sums.others, sums.copies - 1);
}

}  // namespace selfattn::cuda
