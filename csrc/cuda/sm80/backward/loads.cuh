// What a block of the backward reads, from global to shared memory.
#pragma once

#include "../loads.cuh"
#include "shared_layout.cuh"

namespace selfattn::cuda::sm80::backward {

// Rows of one of the four operands.
struct Matrix {
  const View& view;
  int64_t offset;  // of the first row
  int columns;     // head dim or value dim
  bool vectors;    // rows can be read 16 bytes at a time
};

// Brings the first `count` rows of a matrix into a tile; the rest of the tile becomes zeros.
// 16-bit types are on their way when this returns. float32 is there, split into pieces: the products of six
// pieces take so long that waiting is not felt, and shared memory has no room for a staging area. Numbers
// without pieces become zero, and the rows that hold them are marked. Returns whether this thread met one.
template <class C, int kRowCount>
__device__ __forceinline__ bool load_tile(const Matrix& matrix, int count, unsigned char* tile,
                                          unsigned char* flags) {
  using Storage = typename Element<C::kDType>::Storage;
  const int64_t stride = matrix.view.stride[2];
  const Storage* rows = static_cast<const Storage*>(matrix.view.data) + matrix.offset;
  if constexpr (!C::kFloat32) {
    start_rows<C, kRowCount>(tile, rows, stride, count, matrix.columns, matrix.vectors);
    return false;
  } else {
    using Share = TileShare<C, kRowCount, C::kDim / 4>;
    constexpr int kPlane = kRowCount * C::kDim * 2;
    const Share share;
    return share.flag_rows(flags, [&](int r) {
      bool special = false;
#pragma unroll 2
      for (int i = 0; i < Share::kPerLane; ++i) {
        const int chunk = share.lane + i * Share::kLanes;
        const float4 x =
            load_four(rows + r * stride, chunk * 4, r < count ? matrix.columns : 0, matrix.vectors);
        special |= store_pieces<C, true>(tile, kPlane, r, chunk, x);
      }
      return special;
    });
  }
}

// From a query or a key on.
template <class C>
__device__ __forceinline__ Matrix query_matrix(const Plan& plan, const Work<C>& work, int head, int query) {
  const View& view = plan.params.query;
  return {view, work.offset_of_query(view, head, query), static_cast<int>(plan.params.head_dim),
          plan.query_vectors};
}
template <class C>
__device__ __forceinline__ Matrix key_matrix(const Plan& plan, const Work<C>& work, int key) {
  const View& view = plan.params.key;
  return {view, work.offset_of_key(view, work.kv_head, key), static_cast<int>(plan.params.head_dim),
          plan.key_vectors};
}
template <class C>
__device__ __forceinline__ Matrix value_matrix(const Plan& plan, const Work<C>& work, int key) {
  const View& view = plan.params.value;
  return {view, work.offset_of_key(view, work.kv_head, key), static_cast<int>(plan.params.value_dim),
          plan.value_vectors};
}
template <class C>
__device__ __forceinline__ Matrix grad_out_matrix(const Plan& plan, const Work<C>& work, int head,
                                                  int query) {
  const View& view = plan.arguments.grad_out;
  return {view, work.offset_of_query(view, head, query), static_cast<int>(plan.params.value_dim),
          plan.grad_out_vectors};
}

// Starts to bring the numbers of a tile of queries.
template <class C>
__device__ __forceinline__ void start_statistics(const Plan& plan, const Work<C>& work,
                                                 const SharedMemory<C>& shared, int head, int first_query) {
  const Statistics& statistics = plan.statistics;
  const int64_t at = work.first_statistic + head * statistics.queries + first_query;
  const int chunk = ptx::opaque(static_cast<int>(threadIdx.x)) * 4;
  static_assert(C::kQueries / 4 <= C::kThreads, "a chunk for each thread");
  if (chunk >= C::kQueries) return;
  ptx::copy_async_16(shared.shift() + chunk, statistics.shift + at + chunk, true);
  if (!C::kPlain) ptx::copy_async_16(shared.inverse_sum() + chunk, statistics.inverse_sum + at + chunk, true);
  if (!C::kReadsDelta) ptx::copy_async_16(shared.delta() + chunk, statistics.delta + at + chunk, true);
}

// The tiles that the block owns, once. Returns whether this thread met a number that needs attention.
template <class C>
__device__ __forceinline__ bool load_own(const Plan& plan, const Work<C>& work,
                                         const SharedMemory<C>& shared) {
  const int row = work.first_row;
  const Matrix first =
      C::kOwnsQueries ? query_matrix(plan, work, work.head, row) : key_matrix(plan, work, row);
  const Matrix second =
      C::kOwnsQueries ? grad_out_matrix(plan, work, work.head, row) : value_matrix(plan, work, row);
  if (C::kOwnsQueries) start_statistics<C>(plan, work, shared, work.head, row);
  bool special = load_tile<C, C::kRows>(first, work.rows, shared.own_first(), shared.own_first_flags());
  if constexpr (C::kNeedsSecondDots) {
    special |= load_tile<C, C::kRows>(second, work.rows, shared.own_second(), shared.own_second_flags());
  }
  return special;
}

// A passing tile: queries (with their numbers) or keys.
template <class C>
__device__ __forceinline__ bool load_first(const Plan& plan, const Work<C>& work,
                                           const SharedMemory<C>& shared, Passing passing) {
  const Matrix matrix = C::kOwnsQueries ? key_matrix(plan, work, passing.first)
                                        : query_matrix(plan, work, passing.head, passing.first);
  if (!C::kOwnsQueries) start_statistics<C>(plan, work, shared, passing.head, passing.first);
  return load_tile<C, C::kColumns>(matrix, work.count(passing), shared.passing_first(),
                                   shared.passing_first_flags());
}

// The other one: dO or values.
template <class C>
__device__ __forceinline__ bool load_second(const Plan& plan, const Work<C>& work,
                                            const SharedMemory<C>& shared, Passing passing) {
  const Matrix matrix = C::kOwnsQueries ? value_matrix(plan, work, passing.first)
                                        : grad_out_matrix(plan, work, passing.head, passing.first);
  return load_tile<C, C::kColumns>(matrix, work.count(passing), shared.passing_second(),
                                   shared.passing_second_flags());
}

}  // namespace selfattn::cuda::sm80::backward
