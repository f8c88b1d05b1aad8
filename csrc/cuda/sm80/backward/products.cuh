// The matrix products of a backward tile, by the functions of multiply.cuh.
#pragma once

#include "../multiply.cuh"
#include "sm80_backward_shared_memory.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::Lane;
using mma::Output;
using mma::Scores;
using mma::backward::Plan;

// products = own passing^T, for tiles in shared memory.
template <class C>
__device__ __forceinline__ void multiply_tiles(const unsigned char* own, const unsigned char* passing,
                                               int64_t dim, int pieces, Scores<C>& products) {
  using Layout = SharedLayout<C>;
  const Lane<C> lane;
  multiply_rows<C>(Operand{own, Layout::kOwnPlane, lane.first_row},
                   Operand{passing, Layout::kPassingPlane, lane.first_column}, lane.lane,
                   static_cast<int>(dim), pieces, products.at);
}

// s = queries keys^T or its transpose.
template <class C>
__device__ __forceinline__ void multiply_qk(const Plan& plan, const SharedMemory<C>& shared, Scores<C>& s) {
  multiply_tiles(shared.own_qk(), shared.passing_qk(), plan.params.head_dim, plan.pieces, s);
}

// dp = dO values^T or its transpose.
template <class C>
__device__ __forceinline__ void multiply_vo(const Plan& plan, const SharedMemory<C>& shared, Scores<C>& dp) {
  multiply_tiles(shared.own_vo(), shared.passing_vo(), plan.params.value_dim, plan.pieces, dp);
}

// output += factors passing.
template <class C>
__device__ __forceinline__ void accumulate_tile(const Scores<C>& factors, const unsigned char* passing,
                                                int64_t dim, int pieces, Output<C>& output) {
  const Lane<C> lane;
  accumulate<C>(factors.at, Operand{passing, SharedLayout<C>::kPassingPlane, lane.first_column}, lane.lane,
                static_cast<int>(dim), pieces, output.at);
}

// output += gradients of scores, keys or queries.
template <class C>
__device__ __forceinline__ void accumulate_qk(const Plan& plan, const SharedMemory<C>& shared,
                                              const Scores<C>& ds, Output<C>& output) {
  accumulate_tile(ds, shared.passing_qk(), plan.params.head_dim, plan.pieces, output);
}

// output += weights dO.
template <class C>
__device__ __forceinline__ void accumulate_vo(const Plan& plan, const SharedMemory<C>& shared,
                                              const Scores<C>& weights, Output<C>& output) {
  accumulate_tile(weights, shared.passing_vo(), plan.params.value_dim, plan.pieces, output);
}

}  // namespace selfattn::cuda::sm80::backward
