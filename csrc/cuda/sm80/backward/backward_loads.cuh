// Copies of the backward's tiles and statistics from global to shared memory.
#pragma once

#include "../loads.cuh"
#include "sm80_backward_shared_memory.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::TileShare;
using mma::backward::Passing;
using mma::backward::Plan;
using mma::backward::Statistics;

// The rows of one of the four operands that belong to a head.
struct Matrix {
  const void* rows;
  int64_t stride;
  int64_t columns;  // head dim or value dim
  bool vectors;     // rows can be read 16 bytes at a time
};

// Copies `count` rows of a matrix from `first` on into a tile; the rest of the tile becomes zeros. 16-bit
// types are on their way when this returns. float32 has arrived, split into pieces: the six products of
// pieces take so long that waiting costs little, and shared memory has no room for a staging area. Numbers
// without pieces become zero, and the rows that hold them are marked. Returns whether this thread met one.
template <class C, int kRowCount>
__device__ __forceinline__ bool load_tile(const Matrix& matrix, int first, int count, unsigned char* tile,
                                          unsigned char* flags) {
  const auto* rows = static_cast<const typename Element<C::kDType>::Storage*>(matrix.rows);
  const int columns = static_cast<int>(matrix.columns);
  if constexpr (!C::kFloat32) {
    start_rows<C, kRowCount>(tile, rows, matrix.stride, first, count, columns, matrix.vectors);
    return false;
  } else {
    using Share = TileShare<C, kRowCount, C::kDim / 4>;
    constexpr int kPlane = kRowCount * C::kDim * 2;
    const Share share;
    return share.flag_rows(flags, [&](int r) {
      bool special = false;
#pragma unroll 2
      for (int i = 0; i < Share::kPerLane; ++i) {
        const int chunk = share.chunk(i);
        const float4 x =
            load_four(rows + (first + r) * matrix.stride, chunk * 4, r < count ? columns : 0, matrix.vectors);
        special |= store_pieces<C, true>(tile, kPlane, r, chunk, x);
      }
      return special;
    });
  }
}

// A tensor that operands are read from: queries or keys, dO or values.
struct Source {
  const View& view;
  int64_t columns;
  bool vectors;
};
template <bool kOfQueries>
__device__ __forceinline__ Source qk_operand(const Plan& plan) {
  const AttentionParams& p = plan.params;
  if (kOfQueries) return {p.query, p.head_dim, plan.query_vectors};
  return {p.key, p.head_dim, plan.key_vectors};
}
template <bool kOfQueries>
__device__ __forceinline__ Source vo_operand(const Plan& plan) {
  const AttentionParams& p = plan.params;
  if (kOfQueries) return {plan.arguments.grad_out, p.value_dim, plan.grad_out_vectors};
  return {p.value, p.value_dim, plan.value_vectors};
}

template <class C>
__device__ __forceinline__ Matrix own_matrix(const Source& operand, const Work<C>& work) {
  const auto* rows = work.template rows_of<C::kOwnsQueries>(operand.view);
  return {rows, operand.view.stride[2], operand.columns, operand.vectors};
}
// `rows`: passing_qk or passing_vo of Work, which are the first head's.
template <class C>
__device__ __forceinline__ Matrix passing_matrix(const Source& operand, const Work<C>& work, const void* rows,
                                                 int head) {
  const auto* first = static_cast<const typename Element<C::kDType>::Storage*>(rows);
  if (!C::kOwnsQueries) first += (head - work.head) * operand.view.stride[1];
  return {first, operand.view.stride[2], operand.columns, operand.vectors};
}

// Starts to copy the statistics of a tile of queries.
template <class C>
__device__ __forceinline__ void start_statistics(const Plan& plan, const Work<C>& work,
                                                 const SharedMemory<C>& shared, int head, int first_query) {
  const Statistics& statistics = plan.statistics;
  const int64_t at = work.first_statistic + head * statistics.queries + first_query;
  const int chunk = mma::this_thread<C>() * 4;
  static_assert(C::kQueries / 4 <= C::kThreads, "a chunk for each thread");
  if (chunk >= C::kQueries) return;
  ptx::copy_async_16(shared.shift() + chunk, statistics.shift + at + chunk, true);
  if (!C::kBare) ptx::copy_async_16(shared.inverse_sum() + chunk, statistics.inverse_sum + at + chunk, true);
  if (!C::kReadsDelta) ptx::copy_async_16(shared.delta() + chunk, statistics.delta + at + chunk, true);
}

// Loads the tiles that the block owns, once. Returns whether this thread met a number without pieces.
template <class C>
__device__ __forceinline__ bool load_own(const Plan& plan, const Work<C>& work,
                                         const SharedMemory<C>& shared) {
  const int row = work.first_row;
  if (C::kOwnsQueries) start_statistics<C>(plan, work, shared, work.head, row);
  bool special = load_tile<C, C::kRows>(own_matrix(qk_operand<C::kOwnsQueries>(plan), work), row, work.rows,
                                        shared.own_qk(), shared.own_qk_flags());
  if constexpr (C::kNeedsDP) {
    special |= load_tile<C, C::kRows>(own_matrix(vo_operand<C::kOwnsQueries>(plan), work), row, work.rows,
                                      shared.own_vo(), shared.own_vo_flags());
  }
  return special;
}

// Loads a passing tile of qk: queries (with their statistics) or keys.
template <class C>
__device__ __forceinline__ bool load_qk(const Plan& plan, const Work<C>& work, const SharedMemory<C>& shared,
                                        Passing passing) {
  const Matrix matrix =
      passing_matrix(qk_operand<!C::kOwnsQueries>(plan), work, work.passing_qk, passing.head);
  if (!C::kOwnsQueries) start_statistics<C>(plan, work, shared, passing.head, passing.first);
  return load_tile<C, C::kColumns>(matrix, passing.first, work.count(passing), shared.passing_qk(),
                                   shared.passing_qk_flags());
}

// Loads a passing tile of vo: dO or values.
template <class C>
__device__ __forceinline__ bool load_vo(const Plan& plan, const Work<C>& work, const SharedMemory<C>& shared,
                                        Passing passing) {
  const Matrix matrix =
      passing_matrix(vo_operand<!C::kOwnsQueries>(plan), work, work.passing_vo, passing.head);
  return load_tile<C, C::kColumns>(matrix, passing.first, work.count(passing), shared.passing_vo(),
                                   shared.passing_vo_flags());
}

}  // namespace selfattn::cuda::sm80::backward
