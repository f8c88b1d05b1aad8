// Warps that misuse barriers or registers that they hand over, and blocks that misuse a counter.
#pragma once

#include "wrong.cuh"

namespace hopper {

__global__ void threads_differ(const __grid_constant__ Arguments arguments) {
  ptx::sync_threads(3, threadIdx.x < kGroup || arguments.right ? kThreads : kThreads - 64);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void half_arrived(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < kGroup) ptx::arrive_threads(3, kThreads);
  if (threadIdx.x >= kGroup && arguments.right) ptx::sync_threads(3, kThreads);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void nobody_arrives(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < kGroup) ptx::sync_threads(3, kThreads);
  if (threadIdx.x >= kGroup && arguments.right) ptx::arrive_threads(3, kThreads);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void number_of_no_barrier(const __grid_constant__ Arguments arguments) {
  ptx::sync_threads(arguments.right ? 15 : 16, kThreads);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void threads_of_no_warps(const __grid_constant__ Arguments arguments) {
  ptx::sync_threads(1, arguments.right ? kThreads : kThreads - 16);
  arguments.out[threadIdx.x] = threadIdx.x;
}

// A warp that only arrives at a barrier does not know what the others have done.
__global__ void arrived_without_waiting(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  auto* const words = reinterpret_cast<float*>(shared);
  words[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (threadIdx.x < kGroup && !arguments.right) {
    ptx::arrive_threads(1, kThreads);
  } else {
    ptx::sync_threads(1, kThreads);
  }
  arguments.out[threadIdx.x] = words[(threadIdx.x + kGroup) % kThreads];
}

// Kernels about registers that warpgroups hand over.

__global__ void registers_not_given_up(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x >= kGroup) {
    ptx::take_registers<232>();
  } else if (arguments.right) {
    ptx::give_up_registers<40>();
  }
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void registers_of_one_warp(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < (arguments.right ? kGroup : 32)) ptx::give_up_registers<40>();
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void registers_beyond(const __grid_constant__ Arguments arguments) {
  if (arguments.right) {
    ptx::give_up_registers<40>();
  } else {
    ptx::give_up_registers<44>();
  }
  arguments.out[threadIdx.x] = threadIdx.x;
}

// Two blocks increase one counter.
__global__ void counted_by_two_blocks(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x != 0) return;
  if (arguments.right) {
    atomicAdd(arguments.counter, 1);
  } else {
    *arguments.counter += 1;
  }
}

}  // namespace hopper
