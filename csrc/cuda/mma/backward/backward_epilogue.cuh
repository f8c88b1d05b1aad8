// From accumulators to gradients: warps are added up, rows scaled and written.
#pragma once

#include "../../common/elementary.cuh"
#include "../epilogue.cuh"
#include "weigh.cuh"

namespace selfattn::cuda::mma::backward {

// The second of two warps that share rows hands its numbers to the first, in place of the tiles in shared
// memory, which are no longer needed. Called by all warps.
template <class C, class Shared, int kRowCount, int kColumnCount>
__device__ __forceinline__ void add_column_warps(const Shared& shared,
                                                 float (&numbers)[kRowCount][kColumnCount]) {
  if constexpr (C::kColumnWarps > 1) {
    static_assert(C::kColumnWarps == 2, "one addition");
    constexpr int kLanes = kWarp * C::kRowWarps;
    const int thread = Lane<C>().thread;
    float* at = shared.exchange() + thread % kLanes;
    __syncthreads();  // all warps have read what was there
    if (thread >= kLanes) {
#pragma unroll
      for (int n = 0; n < kRowCount * kColumnCount; ++n) {
        at[n * kLanes] = numbers[n / kColumnCount][n % kColumnCount];
      }
    }
    __syncthreads();
    if (thread < kLanes) {
#pragma unroll
      for (int n = 0; n < kRowCount * kColumnCount; ++n) {
        numbers[n / kColumnCount][n % kColumnCount] += at[n * kLanes];
      }
    }
    // Rows that are written next take other places of the same memory.
    __syncthreads();
  }
}

// The tensor that results go to.
struct Target {
  const View& view;
  int head;
  int columns;
  bool vectors;  // can be written 16 bytes at a time
  bool pairs;    // can be written two elements at a time
};

// Writes rows through shared memory, in place of the tiles, so that neighbouring lanes write a row; each warp
// writes its own rows. Called by all warps.
template <class C, class Shared>
__device__ __forceinline__ void write_rows(const Work<C>& work, const Shared& shared, Output<C>& output,
                                           float factor, const Target& target) {
  const Lane<C> lane;
  static_assert(C::kColumnWarps == 1 || C::kStrips == 1, "the accumulators of one strip are one array");
  add_column_warps<C>(shared, output.at[0]);
  if (lane.thread >= kWarp * C::kRowWarps) return;
  float* rows = shared.exchange();
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < C::kDimTiles; ++tile) {
        *reinterpret_cast<float2*>(rows +
                                   exchanged<C::kExchangeColumns>(lane.row(strip, half), lane.dim(tile))) =
            float2{output.at[strip][tile][2 * half] * factor, output.at[strip][tile][2 * half + 1] * factor};
      }
    }
  }
  __syncwarp();
  const int end = min(lane.first_row + C::kWarpRows, work.rows);
  const auto offset = [&](int r) {
    return C::kOwnsQueries ? work.offset_of_query(target.view, target.head, work.first_row + r)
                           : work.offset_of_key(target.view, target.head, work.first_row + r);
  };
  if constexpr (!C::kFloat32) {
    if (target.vectors) {
      for_each_chunk(rows, lane, end, 0, target.columns, [&](int r, int column, const float (&x)[8]) {
        store_chunk<C::kDType>(target.view.data, offset(r) + column, x);
      });
      return __syncwarp();
    }
  }
#pragma unroll 1
  for (int r = lane.first_row; r < end; ++r) {
    const int64_t at = offset(r);
#pragma unroll 1
    for (int column = lane.lane * 2; column < target.columns; column += 2 * kWarp) {
      const float2 pair = *reinterpret_cast<const float2*>(rows + exchanged<C::kExchangeColumns>(r, column));
      store_pair<C::kDType>(target.view.data, at + column, pair.x, pair.y, column + 1 < target.columns,
                            target.pairs);
    }
  }
  __syncwarp();
}

// Writes all that a block has summed up. Called by all warps when none needs the tiles any more.
template <class C, class Shared>
__device__ __forceinline__ void write_gradients(const Plan& plan, const Work<C>& work, const Shared& shared,
                                                Slopes<C>& slopes, Output<C>& qk_sum, Output<C>& vo_sum) {
  const AttentionParams& p = plan.params;
  const BackwardArguments& a = plan.arguments;
  if constexpr (C::kSide == Side::kQuery) {
    if constexpr (C::kColumnWarps > 1) add_column_warps<C>(shared, slopes.sum);
    const Lane<C> lane;
    if (lane.thread < kWarp * C::kRowWarps) slopes.write(plan, work, lane);
  }
  const int head = C::kOwnsQueries ? work.head : work.kv_head;
  if constexpr (C::kSumsQK) {
    const bool vectors = C::kOwnsQueries ? plan.grad_query_vectors : plan.grad_key_vectors;
    const bool pairs = C::kOwnsQueries ? plan.grad_query_pairs : plan.grad_key_pairs;
    write_rows<C>(
        work, shared, qk_sum, plan.scale,
        {C::kOwnsQueries ? a.grad_query : a.grad_key, head, static_cast<int>(p.head_dim), vectors, pairs});
  }
  if constexpr (C::kSumsVO) {
    write_rows<C>(
        work, shared, vo_sum, plan.dropout_scale,
        {a.grad_value, head, static_cast<int>(p.value_dim), plan.grad_value_vectors, plan.grad_value_pairs});
  }
}

}  // namespace selfattn::cuda::mma::backward
