// From a forward call to the sm90 kernels that compute it.
#pragma once

#include <algorithm>

#include "sm90.h"
#include "sm90_forward.cuh"

namespace selfattn::cuda::sm90 {

template <class C>
void run_path(const AttentionParams& p, const ForwardOutputs& outputs, cudaStream_t stream, void* workspace) {
  const Plan plan = plan_forward(p, outputs, {C::kRows, C::kKeys, false}, workspace);
  if (plan.blocks == 0) return;
  clear_async(plan.next_item, sizeof(*plan.next_item), stream);
  const int64_t blocks = std::min<int64_t>(plan.blocks, multiprocessors());
  launch(&forward_kernel<C>, dim3(static_cast<unsigned>(blocks)), dim3(C::kBlockThreads),
         SharedLayout<C>::kBytes, stream, plan);
}

template <DType kDType, int kDim, int kValueDim>
void run_forward(const AttentionParams& p, const ForwardOutputs& outputs, cudaStream_t stream,
                 void* workspace) {
  if constexpr (kDim <= kMostDimWithOptions) {
    if (!mma::is_bare(p)) {
      return run_path<Config<kDType, kDim, kValueDim, false>>(p, outputs, stream, workspace);
    }
  }
  run_path<Config<kDType, kDim, kValueDim, true>>(p, outputs, stream, workspace);
}

}  // namespace selfattn::cuda::sm90
