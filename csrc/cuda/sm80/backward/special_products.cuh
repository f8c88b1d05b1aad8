// Products with numbers that mma.sync cannot take, computed one by one.
//
// mma/backward/special_terms.cuh says which numbers these are.
#pragma once

#include "../../mma/backward/special_terms.cuh"
#include "../special_numbers.cuh"
#include "sm80_backward_shared_memory.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::Output;
using mma::Scores;
using mma::TileShare;
using mma::backward::Place;

// Sets an element, of which n counts the lane's columns. Loops over elements are not unrolled, to keep rare
// code small. Registers have no index at run time, hence the selection.
template <class C>
__device__ __forceinline__ void set_element(Scores<C>& elements, int half, int n, float x) {
  static_assert(C::kStrips == 1, "the element is in the only strip");
#pragma unroll
  for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (m / 2 == half && tile * 2 + m % 2 == n) elements.at[0][tile][m] = x;
    }
  }
}

__device__ __forceinline__ const float* floats_at(const View& view, int64_t offset) {
  return static_cast<const float*>(view.data) + offset;
}

// float32: computes s and dp anew for rows and columns that hold a number without pieces.
template <class C>
__device__ __forceinline__ void replace_special_products(const Place<C>& at, const SharedMemory<C>& shared,
                                                         Scores<C>& s, Scores<C>& dp) {
  const AttentionParams& p = at.params();
  const Work<C>& work = at.work;
#pragma unroll 1
  for (int n = 0; n < C::kColumnTiles * 2; ++n) {
    const int column = at.lane.column(n / 2) + n % 2;
    if (column >= work.count(at.passing)) continue;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int row = at.lane.row(0, half);
      const int query = at.query(0, half, n / 2, n % 2).query, key = at.key(0, half, n / 2, n % 2);
      if (shared.own_qk_flags()[row] || shared.passing_qk_flags()[column]) {
        const float* x = floats_at(p.query, work.offset_of_query(p.query, at.passing.head, query));
        const float* y = floats_at(p.key, work.offset_of_key(p.key, work.kv_head, key));
        set_element<C>(s, half, n, dot_product(x, y, static_cast<int>(p.head_dim)));
      }
      if (shared.own_vo_flags()[row] || shared.passing_vo_flags()[column]) {
        const View& grad_out = at.plan.arguments.grad_out;
        const float* x = floats_at(grad_out, work.offset_of_query(grad_out, at.passing.head, query));
        const float* y = floats_at(p.value, work.offset_of_key(p.value, work.kv_head, key));
        set_element<C>(dp, half, n, dot_product(x, y, static_cast<int>(p.value_dim)));
      }
    }
  }
}

template <class C>
__device__ __forceinline__ bool clear_non_finite(const SharedMemory<C>& shared) {
  const auto clear = [](unsigned char* tile, unsigned char* flags) {
    return mma::backward::clear_non_finite_rows<C, C::kDim>(
        flags, [&](int r, int chunk) { return tile + Swizzle<C::kDim>::offset(r, chunk); });
  };
  bool any = false;
  if constexpr (C::kSumsQK) any |= clear(shared.passing_qk(), shared.passing_qk_flags());
  if constexpr (C::kSumsVO) any |= clear(shared.passing_vo(), shared.passing_vo_flags());
  return any;
}

}  // namespace selfattn::cuda::sm80::backward
