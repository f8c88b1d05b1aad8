// Rings of stages in shared memory that the producer fills and other warps compute with.
//
// Each stage has a barrier "full", which the warps that compute wait for, and one "empty", which the producer
// waits for.
#pragma once

#include "../common/device.cuh"
#include "../common/ptx_sm90.cuh"

namespace selfattn::cuda::sm90 {

// The position of a thread in a ring: the stage, and the parity of the phase that its barriers are in.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One lane waits for the warp. If each lane did, one could be so late that the phase after the next has
// begun, which looks like the one before.
__device__ __forceinline__ void wait_for_warp(uint64_t* barrier, uint32_t parity) {
  if (threadIdx.x % kWarp == 0) ptx::barrier_wait(barrier, parity);
  __syncwarp();
}

// Each warp signals for itself that it is done with a stage.
__device__ __forceinline__ void arrive_of_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) ptx::barrier_arrive(barrier);
}

}  // namespace selfattn::cuda::sm90
