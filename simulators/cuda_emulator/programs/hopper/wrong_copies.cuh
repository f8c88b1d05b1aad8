// Copies that are used wrongly, and shared memory that threads, copies and products share wrongly.
#pragma once

#include "wrong.cuh"

namespace hopper {

__global__ void box_misaligned(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, kPanelBytes, memory.panels + (arguments.right ? 1024 : 512));
}

__global__ void box_beyond_shared(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, kPanelBytes, memory.panels + (arguments.right ? 3 : 4) * kPanelBytes);
}

__global__ void map_is_none(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    alignas(64) TensorMap other = arguments.map;
    if (!arguments.right) other.bytes[0] ^= 1;
    ptx::barrier_arrive_expecting(memory.full, kPanelBytes);
    ptx::copy_box_async(memory.panels, &other, memory.full, 0, 0, 0, 0);
  }
  ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void copy_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) copy_tile(arguments, memory.panels, memory.full, 0);
  if (arguments.right) ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void copy_read_early(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) copy_tile(arguments, memory.panels, memory.full, 0);
  __syncthreads();
  if (arguments.right) ptx::barrier_wait(memory.full, 0);
  const uint16_t element = reinterpret_cast<const uint16_t*>(memory.panels)[threadIdx.x];
  if (!arguments.right) ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = selfattn::float_from_float16(element);
}

// A later copy, which another barrier counts, may arrive first.
__global__ void other_copy_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    copy_tile(arguments, memory.panels, &memory.full[0], 0);
    copy_tile(arguments, memory.panels + kPanelBytes, &memory.full[1], 1);
  }
  ptx::barrier_wait(&memory.full[1], 0);
  if (arguments.right) ptx::barrier_wait(&memory.full[0], 0);
  const uint16_t element = reinterpret_cast<const uint16_t*>(memory.panels)[threadIdx.x];
  if (!arguments.right) ptx::barrier_wait(&memory.full[0], 0);
  arguments.out[threadIdx.x] = selfattn::float_from_float16(element);
}

// Here threads write what products read, or what copies overwrite.

__device__ void write_panel(unsigned char* panel, const uint16_t* rows, int number) {
  for (int element = number; element < kRows * 64; element += kGroup) {
    const int row = element / 64, column = element % 64;
    const int chunk = column / 8 ^ row % 8;
    reinterpret_cast<uint16_t*>(panel)[row * 64 + chunk * 8 + column % 8] = rows[element];
  }
}

__device__ void written_operand(const Arguments& arguments, unsigned char* shared, bool fences, bool waits) {
  if (threadIdx.x >= kGroup) return;
  write_panel(shared, arguments.rows, threadIdx.x);
  if (fences) ptx::fence_async_proxy();
  if (waits) ptx::sync_threads(1, kGroup);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void written_operand_not_fenced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  written_operand(arguments, shared, arguments.right, true);
}

__global__ void written_operand_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  written_operand(arguments, shared, true, arguments.right);
}

__global__ void copy_over_writes(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x < kGroup) write_panel(memory.panels, arguments.rows, threadIdx.x);
  if (arguments.right) ptx::fence_async_proxy();
  __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

// Threads overwrite operands that products still read.
__global__ void write_over_operand(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  if (threadIdx.x >= 2 * kGroup) return;
  if (threadIdx.x >= kGroup) {
    ptx::sync_threads(2, 2 * kGroup);
    write_panel(shared, arguments.rows, threadIdx.x - kGroup);
    return;
  }
  write_panel(shared, arguments.rows, threadIdx.x);
  ptx::fence_async_proxy();
  ptx::sync_threads(1, kGroup);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared, false);
  ptx::products_commit();
  if (!arguments.right) ptx::arrive_threads(2, 2 * kGroup);
  ptx::products_wait<0>();
  if (arguments.right) ptx::arrive_threads(2, 2 * kGroup);
  write_out(arguments, d);
}

}  // namespace hopper
