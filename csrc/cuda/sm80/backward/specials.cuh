// Numbers that products cannot take: of float32 those without pieces (../special.cuh), of 16-bit types NaN
// and Inf (../non_finite.cuh). In tiles whose rows are summed up they are zero, and their terms are added one
// by one, in float, to the rows that see them. What a row is made of depends on itself and on what it sees
// alone.
//
// float32 looks at every number anyway, zeroes these everywhere, and computes the dot products of rows that
// hold one anew. The 16-bit types multiply whatever there is: an element of a product of scores depends on
// its own query and key, and if these may not see each other it is replaced. They zero what passes by once
// the products of scores are there, and that only in a block whose results turned out not to be finite.
#pragma once

#include "../non_finite.cuh"
#include "../special.cuh"
#include "weigh.cuh"

namespace selfattn::cuda::sm80::backward {

// Elements are taken in loops that are not unrolled, to keep rare code small; registers have no index at run
// time, hence the selection. n counts the lane's columns.
template <class C>
__device__ __forceinline__ void set_element(Scores<C>& elements, int half, int n, float x) {
  static_assert(C::kStrips == 1, "of the only strip");
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

// float32: s and dp of rows and columns that hold such a number.
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
      if (shared.own_first_flags()[row] || shared.passing_first_flags()[column]) {
        const float* x = floats_at(p.query, work.offset_of_query(p.query, at.passing.head, query));
        const float* y = floats_at(p.key, work.offset_of_key(p.key, work.kv_head, key));
        set_element<C>(s, half, n, dot_product(x, y, static_cast<int>(p.head_dim)));
      }
      if (shared.own_second_flags()[row] || shared.passing_second_flags()[column]) {
        const View& grad_out = at.plan.arguments.grad_out;
        const float* x = floats_at(grad_out, work.offset_of_query(grad_out, at.passing.head, query));
        const float* y = floats_at(p.value, work.offset_of_key(p.value, work.kv_head, key));
        set_element<C>(dp, half, n, dot_product(x, y, static_cast<int>(p.value_dim)));
      }
    }
  }
}

// 16-bit types: zeroes what is not finite in a passing tile, which has arrived for all threads, and marks its
// rows. chunk_at(row, chunk): where eight elements of the row are, each of them once. Returns whether this
// thread met any.
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

template <class C>
__device__ __forceinline__ bool clear_non_finite(const SharedMemory<C>& shared) {
  const auto clear = [](unsigned char* tile, unsigned char* flags) {
    return clear_non_finite_rows<C, C::kDim>(
        flags, [&](int r, int chunk) { return tile + Swizzle<C::kDim>::offset(r, chunk); });
  };
  bool any = false;
  if constexpr (C::kSumsFirst) any |= clear(shared.passing_first(), shared.passing_first_flags());
  if constexpr (C::kSumsSecond) any |= clear(shared.passing_second(), shared.passing_second_flags());
  return any;
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

// Adds factors * matrix, where rows of the latter are columns of the former, for the elements left out. A
// tile that was copied as a box holds rows of the next sequence behind those of its own: these are marked,
// too, but the mask has no element for them.
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
        if (!sees<!C::kPlain>(p, at.work, query, at.work.key(at.passing, row, column))) continue;
        if (is_dead<C>(shared, C::kOwnsQueries ? row : column)) continue;
        // As above: unrolled, the elements of all dims would be loaded at once.
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

// ds and weights as weigh() leaves them.
template <class C, class Shared>
__device__ __forceinline__ void add_special_terms(const Place<C>& at, const Shared& shared,
                                                  const Scores<C>& weights, const Scores<C>& ds,
                                                  Output<C>& first, Output<C>& second) {
  const AttentionParams& p = at.params();
  const int head = at.passing.head;
  if constexpr (C::kSumsFirst) {
    add_left_out(at, shared,
                 PassingMatrix{C::kOwnsQueries ? p.key : p.query, C::kOwnsQueries ? at.work.kv_head : head,
                               static_cast<int>(p.head_dim), shared.passing_first_flags()},
                 ds, first);
  }
  if constexpr (C::kSumsSecond) {
    add_left_out(at, shared,
                 PassingMatrix{at.plan.arguments.grad_out, head, static_cast<int>(p.value_dim),
                               shared.passing_second_flags()},
                 weights, second);
  }
}

}  // namespace selfattn::cuda::sm80::backward
