// Barriers of copies that are used wrongly: in a pipeline, then in single steps of one.
#pragma once

#include "wrong.cuh"

namespace hopper {

// One group copies tiles; two others each multiply a tile with itself and add the products.
enum class Fault { kNone, kFullNotWaitedFor, kEmptyNotWaitedFor, kReleasedBeforeTheWait, kNotReleased };
__device__ void pipeline(const Arguments& arguments, unsigned char* shared, Fault fault) {
  const Memory memory = memory_of(shared);
  init_barriers(memory, 2 * kGroup);
  if (threadIdx.x < kGroup) {
    ptx::give_up_registers<40>();
    if (threadIdx.x != 0) return;
    for (int tile = 0; tile < kTiles; ++tile) {
      const int stage = tile % kStages;
      const uint32_t round = tile / kStages;
      if (fault != Fault::kEmptyNotWaitedFor) ptx::barrier_wait(&memory.empty[stage], (round & 1) ^ 1);
      copy_tile(arguments, memory.panels + stage * kPanelBytes, &memory.full[stage], tile);
    }
    return;
  }
  ptx::take_registers<232>();
  Results d{};
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    const uint32_t round = tile / kStages;
    const unsigned char* const panel = memory.panels + stage * kPanelBytes;
    if (fault != Fault::kFullNotWaitedFor || tile != 1) ptx::barrier_wait(&memory.full[stage], round & 1);
    ptx::products_fence();
    multiply(d, panel, panel, true);
    ptx::products_commit();
    if (fault == Fault::kReleasedBeforeTheWait) ptx::barrier_arrive(&memory.empty[stage]);
    ptx::products_wait<0>();
    const bool releases = fault != Fault::kReleasedBeforeTheWait && fault != Fault::kNotReleased;
    if (releases) ptx::barrier_arrive(&memory.empty[stage]);
  }
  ptx::products_touch(d);
  write_out(arguments, d);
}

__global__ void full_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kFullNotWaitedFor);
}

__global__ void empty_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kEmptyNotWaitedFor);
}

__global__ void released_before_the_wait(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kReleasedBeforeTheWait);
}

__global__ void not_released(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kNotReleased);
}

// The kernels below have one step of a pipeline each.

// Copies one tile, announcing `bytes`, and waits for it.
__device__ float one_tile(const Arguments& arguments, const Memory& memory, int bytes, unsigned char* panel) {
  if (threadIdx.x == 0) {
    if (bytes > 0) {
      ptx::barrier_arrive_expecting(memory.full, bytes);
    } else {
      ptx::barrier_arrive(memory.full);
    }
    ptx::copy_box_async(panel, &arguments.map, memory.full, 0, 0, 0, 0);
  }
  ptx::barrier_wait(memory.full, 0);
  return selfattn::float_from_float16(reinterpret_cast<const uint16_t*>(panel)[threadIdx.x]);
}

__global__ void barrier_not_initialised(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  if (arguments.right) init_barriers(memory, 1);
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void barrier_initialised_again(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0 && !arguments.right) ptx::barrier_init(memory.full, 1);
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void barrier_not_known_to_copies(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  if (threadIdx.x == 0) ptx::barrier_init(memory.full, 1);
  if (threadIdx.x == 0 && arguments.right) ptx::barrier_init_fence();
  __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

// Under some schedules threads come to a barrier that is not initialised yet; under others there is a race.
__global__ void barrier_not_known_to_threads(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  if (threadIdx.x == 0) {
    ptx::barrier_init(memory.full, 1);
    ptx::barrier_init_fence();
  }
  if (arguments.right) __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void barrier_written_over(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0 && !arguments.right) *memory.full = 1;
  __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void too_many_arrivals(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    ptx::barrier_arrive_expecting(memory.full, kPanelBytes);
    if (!arguments.right) ptx::barrier_arrive(memory.full);
    ptx::copy_box_async(memory.panels, &arguments.map, memory.full, 0, 0, 0, 0);
  }
  ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void too_few_bytes_announced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, arguments.right ? kPanelBytes : kPanelBytes / 2, memory.panels);
}

__global__ void too_many_bytes_announced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, arguments.right ? kPanelBytes : kPanelBytes + 128, memory.panels);
}

__global__ void bytes_not_announced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    ptx::copy_box_async(memory.panels, &arguments.map, memory.full, 0, 0, 0, 0);
    ptx::barrier_arrive_expecting(memory.full, arguments.right ? kPanelBytes : 0);
  }
  ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void barrier_misaligned(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  Memory memory = memory_of(shared);
  if (!arguments.right)
    memory.full = reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(memory.full) + 4);
  if (threadIdx.x == 0) ptx::barrier_init(memory.full, 1);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void parity_beyond_one(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  ptx::barrier_wait(memory.full, arguments.right ? 1 : 3);
  arguments.out[threadIdx.x] = threadIdx.x;
}

}  // namespace hopper
