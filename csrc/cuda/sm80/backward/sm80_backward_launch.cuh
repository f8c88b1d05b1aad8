// From a backward call to the sm80 kernels for queries, keys and values.
#pragma once

#include "../../function/launch_with_function.cuh"
#include "sm80_backward.h"
#include "sm80_gradients.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::backward::Plan;

template <class C>
void run_side(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
              CUstream_st* stream) {
  const Plan plan = mma::backward::plan_side(p, a, statistics, C::kRows, C::kOwnsQueries);
  if (plan.blocks == 0) return;
  launch_with_function(p.function, &backward_kernel<C>, grid_of(plan.blocks), dim3(C::kThreads),
                       SharedLayout<C>::kBytes, stream, plan);
}

template <DType kDType, int kDim, Path kPath>
void run_path(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
              CUstream_st* stream) {
  run_side<Config<kDType, kDim, Side::kQuery, kPath>>(p, a, statistics, stream);
  if constexpr (kDim == 256) {
    run_side<Config<kDType, kDim, Side::kKey, kPath>>(p, a, statistics, stream);
    run_side<Config<kDType, kDim, Side::kValue, kPath>>(p, a, statistics, stream);
  } else {
    run_side<Config<kDType, kDim, Side::kKeyValue, kPath>>(p, a, statistics, stream);
  }
}

template <DType kDType, int kDim>
void run_sides(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
               CUstream_st* stream) {
  // float32 spends its time on products: the bare path would save too little.
  if constexpr (kDType != DType::kFloat32) {
    if (mma::backward::is_bare(p, a)) return run_path<kDType, kDim, Path::kBare>(p, a, statistics, stream);
  }
  run_path<kDType, kDim, Path::kOptions>(p, a, statistics, stream);
}

}  // namespace selfattn::cuda::sm80::backward
