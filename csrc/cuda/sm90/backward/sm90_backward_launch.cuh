// From a backward call to the sm90 kernels for queries, keys and values.
#pragma once

#include "sm90_backward.h"
#include "sm90_gradients.cuh"

namespace selfattn::cuda::sm90::backward {

template <class C>
void run_side(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
              CUstream_st* stream) {
  const Plan plan = plan_side(p, a, statistics, C::kRows, C::kTileColumns, C::kOwnsQueries);
  if (plan.blocks == 0) return;
  launch(&backward_kernel<C>, grid_of(plan.blocks), dim3(C::kBlockThreads), SharedLayout<C>::kBytes, stream,
         plan);
}

template <DType kDType, int kDim, int kValueDim, bool kBare>
void run_path(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
              CUstream_st* stream) {
  run_side<Config<kDType, kDim, kValueDim, Side::kQuery, kBare>>(p, a, statistics, stream);
  if constexpr (kDim > 128) {  // registers do not hold both sums
    run_side<Config<kDType, kDim, kValueDim, Side::kKey, kBare>>(p, a, statistics, stream);
    run_side<Config<kDType, kDim, kValueDim, Side::kValue, kBare>>(p, a, statistics, stream);
  } else {
    run_side<Config<kDType, kDim, kValueDim, Side::kKeyValue, kBare>>(p, a, statistics, stream);
  }
}

template <DType kDType, int kDim, int kValueDim>
void run_sides(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
               CUstream_st* stream) {
  if constexpr (kValueDim <= kMostValueDimWithOptions) {
    if (!mma::backward::is_bare(p, a)) {
      return run_path<kDType, kDim, kValueDim, false>(p, a, statistics, stream);
    }
  }
  run_path<kDType, kDim, kValueDim, true>(p, a, statistics, stream);
}

}  // namespace selfattn::cuda::sm90::backward
