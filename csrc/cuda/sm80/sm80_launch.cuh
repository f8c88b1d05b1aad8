// From a forward call, or one for the weights, to the sm80 kernels that compute it.
#pragma once

#include "../function/launch_with_function.cuh"
#include "../split/merge_splits.h"
#include "sm80.h"
#include "sm80_forward.cuh"
#include "weights.cuh"

namespace selfattn::cuda::sm80 {

using mma::Plan;
using mma::TileShape;

template <class C>
void run_path(const AttentionParams& p, const ForwardOutputs& outputs, cudaStream_t stream, void* workspace) {
  constexpr TileShape kTile = {C::kRows, C::kKeys, C::kFewQuery};
  Plan plan = mma::plan_forward(p, outputs, kTile, workspace);
  do {
    if (plan.blocks == 0) return;
    launch_with_function(p.function, &forward_kernel<C>, grid_of(plan.blocks), dim3(C::kThreads),
                         SharedLayout<C>::kBytes, stream, plan);
    if (plan.split_launch.splits > 1) {
      run_merge<C::kDType>(
          MergePlan<float>{plan.params, plan.outputs, plan.split_launch, plan.dropout_scale, plan.out_pairs},
          stream);
    }
  } while (mma::next_launch(plan, kTile));
}

template <DType kDType, int kDim>
void run_few_queries(const AttentionParams& p, const ForwardOutputs& outputs, cudaStream_t stream,
                     void* workspace) {
  if (may_have_few_queries(p)) run_path<Config<kDType, kDim, Path::kFewQuery>>(p, outputs, stream, workspace);
}

template <DType kDType, int kDim>
void run_forward(const AttentionParams& p, const ForwardOutputs& outputs, cudaStream_t stream,
                 void* workspace) {
  run_few_queries<kDType, kDim>(p, outputs, stream, workspace);
  if (has_few_queries(p)) return;
  // float32 spends its time on products: the bare path would save too little.
  if constexpr (kDType != DType::kFloat32) {
    if (mma::is_bare(p)) return run_path<Config<kDType, kDim, Path::kBare>>(p, outputs, stream, workspace);
  }
  run_path<Config<kDType, kDim, Path::kOptions>>(p, outputs, stream, workspace);
}

template <DType kDType, int kDim>
void run_weights(const AttentionParams& p, const WeightsOutputs& outputs, cudaStream_t stream) {
  using C = Config<kDType, kDim, Path::kOptions>;
  const Plan plan = mma::plan_weights(p, outputs, {C::kRows, C::kKeys, C::kFewQuery});
  if (plan.blocks == 0) return;
  launch_with_function(p.function, &weights_kernel<C>, grid_of(plan.blocks), dim3(C::kThreads),
                       weights_shared_bytes<C>(), stream, plan);
}

}  // namespace selfattn::cuda::sm80
