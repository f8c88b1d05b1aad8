// float32 numbers without pieces: NaN, Inf and extreme magnitudes (mma/pieces.cuh).
//
// They are kept out of the products, and their terms are computed one by one, in float, for the rows that see
// them. So a row depends on its own query and the keys that it sees alone: what is hidden from it, and what
// its neighbours hold, changes no bit of it.
//
// If a query or key holds such a number, the score is computed anew. If a value is one, it is zero in the
// tile, and weight * value is added for the rows that see the key.
#pragma once

#include "../mma/pieces.cuh"
#include "../mma/visibility.cuh"
#include "sm80_shared_memory.cuh"

namespace selfattn::cuda::sm80 {

using mma::Output;
using mma::Place;
using mma::RowOf;
using mma::Scores;

template <class Count>
__device__ __forceinline__ float dot_product(const float* x, const float* y, Count dim) {
  float dot = 0.0f;
#pragma unroll 1
  for (Count e = 0; e < dim; ++e) dot = fmaf(x[e], y[e], dot);
  return dot;
}

// The loop over tiles is not unrolled, to keep rare code small. Registers have no index at run time, hence
// the selection.
template <class C>
__device__ __forceinline__ void replace_special_scores(const Place<C>& at, const SharedMemory<C>& shared,
                                                       Scores<C>& scores) {
  const AttentionParams& p = at.params();
  const Work<C>& work = at.work;
#pragma unroll 1
  for (int n = 0; n < C::kColumnTiles * 2; ++n) {
    const int column = at.lane.column(n / 2) + n % 2;
    if (at.first_key + column >= work.keys) continue;
    const float* key = mma::key_row<float>(p, p.key, work.first_key, work, at.first_key + column);
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row_of_tile = at.lane.row(strip, half);
        if (!shared.key_flags()[column] && !shared.query_flags()[row_of_tile]) continue;
        const RowOf row = work.row(row_of_tile);
        const float* query = static_cast<const float*>(p.query.data) + work.offset(p.query, row);
        const float dot = dot_product(query, key, p.head_dim);
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (tile * 2 + i == n) scores.at[strip][tile][2 * half + i] = dot;
          }
        }
      }
    }
  }
}

// Adds the terms of the special values of one tile.
template <class C>
__device__ __forceinline__ void add_special_values(const Place<C>& at, const SharedMemory<C>& shared,
                                                   const Scores<C>& weights, Output<C>& output) {
  const AttentionParams& p = at.params();
  const Work<C>& work = at.work;
#pragma unroll 1
  for (int n = 0; n < C::kWarpColumns; ++n) {
    const int column = at.lane.first_column + n;
    if (!shared.value_flags()[column]) continue;
    const int key = at.first_key + column;
    const float* values = mma::key_row<float>(p, p.value, work.first_value, work, key);
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float weight = mma::element_of_row(weights.at, at.lane.lane, strip, half, n);
        const RowOf row = work.row(at.lane.row(strip, half));
        if (!mma::sees<!C::kBare>(p, work, row, key)) continue;
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column_of_value = at.lane.dim(tile) + i;
            if (column_of_value >= p.value_dim) continue;
            if (!mma::has_no_pieces(values[column_of_value])) continue;
            float& sum = output.at[strip][tile][2 * half + i];
            sum = fmaf(weight, values[column_of_value], sum);
          }
        }
      }
    }
  }
}

}  // namespace selfattn::cuda::sm80
