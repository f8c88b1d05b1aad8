// The matrix products of a tile, by the functions of the forward (multiply.cuh).
#pragma once

#include "../multiply.cuh"
#include "shared_layout.cuh"

namespace selfattn::cuda::sm80::backward {

// s = queries keys^T or its transpose.
template <class C>
__device__ __forceinline__ void multiply_first(const Plan& plan, const SharedMemory<C>& shared,
                                               Scores<C>& s) {
  using Layout = SharedLayout<C>;
  const Lane<C> lane;
  multiply_rows<C>(Operand{shared.own_first(), Layout::kOwnPlane, lane.first_row},
                   Operand{shared.passing_first(), Layout::kPassingPlane, lane.first_column}, lane.lane,
                   static_cast<int>(plan.params.head_dim), plan.pieces, s.at);
}

// dp = dO values^T or its transpose.
template <class C>
__device__ __forceinline__ void multiply_second(const Plan& plan, const SharedMemory<C>& shared,
                                                Scores<C>& dp) {
  using Layout = SharedLayout<C>;
  const Lane<C> lane;
  multiply_rows<C>(Operand{shared.own_second(), Layout::kOwnPlane, lane.first_row},
                   Operand{shared.passing_second(), Layout::kPassingPlane, lane.first_column}, lane.lane,
                   static_cast<int>(plan.params.value_dim), plan.pieces, dp.at);
}

// output += gradients of scores, keys or queries.
template <class C>
__device__ __forceinline__ void accumulate_first(const Plan& plan, const SharedMemory<C>& shared,
                                                 const Scores<C>& ds, Output<C>& output) {
  const Lane<C> lane;
  accumulate<C>(ds.at, Operand{shared.passing_first(), SharedLayout<C>::kPassingPlane, lane.first_column},
                lane.lane, static_cast<int>(plan.params.head_dim), plan.pieces, output.at);
}

// output += weights dO.
template <class C>
__device__ __forceinline__ void accumulate_second(const Plan& plan, const SharedMemory<C>& shared,
                                                  const Scores<C>& weights, Output<C>& output) {
  const Lane<C> lane;
  accumulate<C>(weights.at,
                Operand{shared.passing_second(), SharedLayout<C>::kPassingPlane, lane.first_column},
                lane.lane, static_cast<int>(plan.params.value_dim), plan.pieces, output.at);
}

}  // namespace selfattn::cuda::sm80::backward
