// How warps that bring and warps that compute hand over places in shared memory: rings of stages, each with
// barriers "full", waited for by those who compute, and "empty", waited for by who brings.
#pragma once

#include "../common/device.cuh"
#include "../common/ptx_sm90.cuh"

namespace selfattn::cuda::sm90 {

// Where a thread stands in a ring of stages: the stage, and the parity of the phase that its barriers are in.
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

// One lane waits for all. If each did, one could be so late that the phase after the next has begun, which
// looks like the one before.
__device__ __forceinline__ void wait_for_warp(uint64_t* barrier, uint32_t parity) {
  if (threadIdx.x % kWarp == 0) ptx::barrier_wait(barrier, parity);
  __syncwarp();
}

// Each warp says for itself that it has done with something.
__device__ __forceinline__ void arrive_of_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) ptx::barrier_arrive(barrier);
}

}  // namespace selfattn::cuda::sm90
