// Products that are used wrongly.
#pragma once

#include "wrong.cuh"

namespace hopper {

// A group that loads both operands and then multiplies them.

__device__ void load_operands(const Arguments& arguments, unsigned char* shared) {
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    for (int n = 0; n < kStages; ++n) copy_tile(arguments, shared + n * kPanelBytes, &memory.full[n], n);
  }
  for (int n = 0; n < kStages; ++n) ptx::barrier_wait(&memory.full[n], 0);
}

__global__ void products_without_fence(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  if (arguments.right) ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void products_without_second_fence(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  for (int n = 0; n < 2; ++n) {
    if (n > 0 && arguments.right) ptx::products_fence();
    multiply(d, shared, shared + kPanelBytes, n > 0);
    ptx::products_commit();
    ptx::products_wait<0>();
    for (auto& tile : d) tile[0] *= 2;
  }
  write_out(arguments, d);
}

__global__ void products_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  if (arguments.right) ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void products_not_committed(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  if (arguments.right) ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

// Waits for the first of two groups only, and then uses the results of the second.
__global__ void newest_group_pending(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results first, second;
  ptx::products_fence();
  multiply(first, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  multiply(second, shared, shared, false);
  ptx::products_commit();
  if (arguments.right) {
    ptx::products_wait<0>();
  } else {
    ptx::products_wait<1>();
  }
  for (int tile = 0; tile < kRows / 8; ++tile) first[tile][0] += second[tile][0];
  write_out(arguments, first);
  if (!arguments.right) ptx::products_wait<0>();
}

__global__ void results_written_early(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  if (!arguments.right && threadIdx.x == 70) d[3][1] = 5;
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void left_operand_written_early(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  uint32_t a[4] = {0x3c003c00u, 0x40003c00u, 0x3c004000u, 0x3c003c00u};  // ones and twos
  ptx::products_fence();
  ptx::product_async<false, 64, true>(d, a, ptx::matrix_by_rows(shared, kRows, 16, 0), false);
  ptx::products_commit();
  if (!arguments.right && threadIdx.x == 70) a[2] = 0;
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void group_diverges(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  const bool other = threadIdx.x / 32 == 2 && !arguments.right;
  multiply(d, shared + (other ? kPanelBytes : 0), shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void group_in_two_places(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  if (threadIdx.x / 32 == 2 && !arguments.right) ptx::products_commit();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void warp_leaves_products(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  if (threadIdx.x / 32 == 6 && !arguments.right) return;
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void matrix_beyond_panel(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  ptx::product_async<false, 64, false, false>(
      d, ptx::matrix_by_columns(shared, kRows, arguments.right ? 0 : 8, 0),
      ptx::matrix_by_columns(shared, kRows, 0, 0), false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void matrix_turned(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  const uint64_t b_matrix = arguments.right ? ptx::matrix_by_columns(shared, kRows, 0, 0)
                                            : ptx::matrix_by_rows(shared, kRows, 0, 0);
  ptx::product_async<false, 64, false, false>(d, ptx::matrix_by_columns(shared, kRows, 0, 0), b_matrix,
                                              false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void matrix_misplaced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  arguments.out[threadIdx.x] = threadIdx.x;
  ptx::matrix_by_columns(shared, kRows, 0, arguments.right ? 16 : 8);
}

}  // namespace hopper
