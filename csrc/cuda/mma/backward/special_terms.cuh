// The terms of numbers that products cannot take, added to gradients one by one.
//
// Such numbers are float32 without pieces (../pieces.cuh), and NaN and Inf of 16-bit types
// (../non_finite.cuh). In tiles whose rows are summed up they are zero, and their terms are added, in float,
// to the rows that see them. So a row depends on itself and on what it sees alone.
//
// float32 looks at every number anyway, zeroes these everywhere, and computes anew the dot products of rows
// that hold one. The 16-bit types multiply whatever there is: an element of a product of scores depends on
// its own query and key, and if these may not see each other it is replaced. They zero what passes by once
// they have the products of scores, and only in a block whose results turned out not to be finite.
#pragma once

#include "../non_finite.cuh"
#include "../pieces.cuh"
#include "../tile_share.cuh"
#include "weigh.cuh"

namespace selfattn::cuda::mma::backward {

// 16-bit types: zeroes what is not finite in a passing tile, which has arrived for all threads, and marks its
// rows. chunk_at(row, chunk) is where eight elements of the row are; the chunks hold each element once.
// Returns whether this thread met any.
template <class C, int kDim, class ChunkAt>
__device__ __forceinline__ bool clear_non_finite_rows(unsigned char* flags, const ChunkAt& chunk_at) {
  using Share = TileShare<C, C::kColumns, kDim / 8>;
  const Share share;
  return share.flag_rows(flags, [&](int r) {
    bool found = false;
#pragma unroll 1
    for (int chunk = share.lane; chunk < kDim / 8; chunk += Share::kLanes) {
      auto* elements = reinterpret_cast<uint16_t*>(chunk_at(r, chunk));
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        if (!is_non_finite<C::kDType>(elements[i])) continue;
        elements[i] = 0;
        found = true;
      }
    }
    return found;
  });
}

// Whether an element of a tensor has been zeroed.
template <DType kDType, class Storage>
__device__ __forceinline__ bool was_left_out(Storage x) {
  if constexpr (kDType == DType::kFloat32) return has_no_pieces(x);
  if constexpr (kDType != DType::kFloat32) return is_non_finite<kDType>(x);
}

// A tensor whose rows pass by.
struct PassingMatrix {
  const View& view;
  int head;
  int columns;                 // head dim or value dim
  const unsigned char* flags;  // of the tile's rows: whether elements were left out
};

// Adds factors * matrix for the elements left out; columns of the factors are rows of the matrix. A tile that
// was copied as a box holds rows of the next sequence after those of its own. These are marked, too, but are
// skipped: the mask has no element for them.
template <class C, class Shared>
__device__ __forceinline__ void add_left_out(const Place<C>& at, const Shared& shared,
                                             const PassingMatrix& matrix, const Scores<C>& factors,
                                             Output<C>& output) {
  using E = Element<C::kDType>;
  using Storage = typename E::Storage;
  const AttentionParams& p = at.plan.params;
  const int columns = at.work.count(at.passing);
#pragma unroll 1
  for (int n = 0; n < C::kWarpColumns; ++n) {
    const int column = at.lane.first_column + n;
    if (column >= columns || !matrix.flags[column]) continue;
    const int passing = at.passing.first + column;
    const auto* elements = static_cast<const Storage*>(matrix.view.data) +
                           (C::kOwnsQueries ? at.work.offset_of_key(matrix.view, matrix.head, passing)
                                            : at.work.offset_of_query(matrix.view, matrix.head, passing));
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = element_of_row(factors.at, at.lane.lane, strip, half, n);
        const int row = at.existing(at.lane.row(strip, half));
        const RowOf query = {at.passing.head, at.work.query(at.passing, row, column)};
        if (!sees<!C::kBare>(p, at.work, query, at.work.key(at.passing, row, column))) continue;
        if (is_dead<C>(shared, C::kOwnsQueries ? row : column)) continue;
        // If this loop were unrolled, the elements of all dims would be loaded at once.
#pragma unroll 1
        for (int m = 0; m < C::kDimTiles * 2; ++m) {
          const int d = at.lane.dim(m / 2) + m % 2;
          if (d >= matrix.columns || !was_left_out<C::kDType>(elements[d])) continue;
          const float element = E::widen(elements[d]);
#pragma unroll
          for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& sum = output.at[strip][tile][2 * half + i];
              if (tile * 2 + i == m) sum = fmaf(factor, element, sum);
            }
          }
        }
      }
    }
  }
}

// `ds` and `weights` are as weigh() leaves them.
template <class C, class Shared>
__device__ __forceinline__ void add_special_terms(const Place<C>& at, const Shared& shared,
                                                  const Scores<C>& weights, const Scores<C>& ds,
                                                  Output<C>& qk_sum, Output<C>& vo_sum) {
  const AttentionParams& p = at.params();
  const int head = at.passing.head;
  if constexpr (C::kSumsQK) {
    add_left_out(at, shared,
                 PassingMatrix{C::kOwnsQueries ? p.key : p.query, C::kOwnsQueries ? at.work.kv_head : head,
                               static_cast<int>(p.head_dim), shared.passing_qk_flags()},
                 ds, qk_sum);
  }
  if constexpr (C::kSumsVO) {
    add_left_out(at, shared,
                 PassingMatrix{at.plan.arguments.grad_out, head, static_cast<int>(p.value_dim),
                               shared.passing_vo_flags()},
                 weights, vo_sum);
  }
}

}  // namespace selfattn::cuda::mma::backward
