// From accumulators to results: rows are normalised and written.
#pragma once

#include "../common/overflow.cuh"
#include "../split/row_results.cuh"
#include "softmax.cuh"

namespace selfattn::cuda::mma {

// The place of a row's column in the shared memory through which rows are written.
//
// Normalised rows (or the sums of splits as they are) go through shared memory, in place of the tiles, so
// that neighbouring lanes write a row; each warp writes its own rows. Against bank conflicts, blocks of eight
// columns change places within the row by its number.
template <int kColumns>
__device__ __forceinline__ int exchanged(int row, int column) {
  constexpr int kBlocks = kColumns % 32 == 0 ? 4 : 2;
  static_assert(kColumns % (8 * kBlocks) == 0, "blocks change places in pairs or fours");
  return row * kColumns + (column ^ (row & (kBlocks - 1)) << 3);
}

// Stores eight neighbouring 16-bit elements, the first of which is at a multiple of 16 bytes.
template <DType kDType>
__device__ __forceinline__ void store_chunk(void* tensor, int64_t at, const float (&x)[8]) {
  using E = Element<kDType>;
  const auto pair = [&](int n) {
    return static_cast<uint32_t>(E::narrow(x[2 * n])) | static_cast<uint32_t>(E::narrow(x[2 * n + 1])) << 16;
  };
  // nvcc 13.0 split a plain assignment into four 4-byte stores.
  __stwb(reinterpret_cast<uint4*>(static_cast<uint16_t*>(tensor) + at),
         uint4{pair(0), pair(1), pair(2), pair(3)});
}

// Calls body(row, column, numbers) for eight neighbouring numbers of a row that the warp has put there, from
// `first` of `columns` on. Each lane has 16 bytes of 16-bit results, and a warp several rows at a time.
template <class C, class Body>
__device__ __forceinline__ void for_each_chunk(const float* rows, const Lane<C>& lane, int end, int first,
                                               int columns, const Body& body) {
  constexpr int kLanes = C::kExchangeColumns / 8, kRowsAtOnce = kWarp / kLanes;
  const int row_of_lane = lane.lane / kLanes, column = lane.lane % kLanes * 8;
  if (row_of_lane >= kRowsAtOnce || first + column >= columns) return;
#pragma unroll 1
  for (int r = lane.first_row + row_of_lane; r < end; r += kRowsAtOnce) {
    const auto* four = reinterpret_cast<const float4*>(rows + exchanged<C::kExchangeColumns>(r, column));
    const float4 low = four[0], high = four[1];
    const float numbers[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    body(r, first + column, numbers);
  }
}

// Writes the results of a warp's rows by chunks. Returns whether all that the lane has written is finite.
template <class C>
__device__ __forceinline__ bool write_chunks(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                             const float* rows, int end, int first) {
  using E = Element<C::kDType>;
  bool finite = true;
  const int columns = static_cast<int>(plan.params.value_dim);
  for_each_chunk(rows, lane, end, first, columns, [&](int r, int column, const float (&x)[8]) {
    const int64_t at = work.offset(plan.outputs.out, work.row(r)) + column;
    store_chunk<C::kDType>(plan.outputs.out.data, at, x);
    if (plan.outputs.out_residual != nullptr) {
      float rest[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) rest[i] = x[i] - E::widen(E::narrow(x[i]));
      store_chunk<C::kDType>(plan.outputs.out_residual, at, rest);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) finite = finite && is_finite_number(x[i] + x[i + 1]);
  });
  return finite;
}

// The same by pairs of numbers, for results that cannot be written 16 bytes at a time and for the sums of a
// split.
template <class C>
__device__ __forceinline__ bool write_pairs(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                            const float* rows, int end, int first, bool partial) {
  const AttentionParams& p = plan.params;
  bool finite = true;
#pragma unroll 1
  for (int r = lane.first_row; r < end; ++r) {
    const RowOf row = work.row(r);
    const int64_t at =
        partial
            ? (plan.split_launch.state(p.heads, work.batch, row.head, row.query) + work.split) * p.value_dim
            : work.offset(plan.outputs.out, row);
#pragma unroll 1
    for (int n = lane.lane * 2; n < C::kExchangeColumns && first + n < p.value_dim; n += 2 * kWarp) {
      const int column = first + n;
      const float2 pair = *reinterpret_cast<const float2*>(rows + exchanged<C::kExchangeColumns>(r, n));
      const bool both = column + 1 < p.value_dim;
      if (partial) {
        plan.split_launch.out[at + column] = pair.x;
        if (both) plan.split_launch.out[at + column + 1] = pair.y;
      } else {
        finite = finite && is_finite_number(pair.x + pair.y);
        store_results<C::kDType>(plan, at + column, pair.x, pair.y, both);
      }
    }
  }
  return finite;
}

// The bare path subtracts the rounded product of maximum and scale from exact ones. With scores beyond this
// the difference may be off by half a power of two, and with still larger ones by more than the exponent of a
// float holds. Such rows are computed once more, in the formula's order. Collective of the warp.
constexpr float kLargeScore = 0x1p23f;

template <class C, class Storage>
__device__ __forceinline__ void write_large_rows(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                                 const Softmax<C, Storage>& softmax) {
  __syncwarp();
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = fabsf(softmax.max[strip][half]);
      const bool large = lane.row(strip, half) < work.rows && most > kLargeScore && most < infinity<float>();
      const uint32_t found = __ballot_sync(kWholeWarp, large);  // four lanes have a row
      if (found == 0) continue;
#pragma unroll 1
      for (int group = 0; group < 8; ++group) {
        if ((found >> 4 * group & 1u) == 0) continue;
        const RowOf row = work.row(lane.first_row + strip * 16 + half * 8 + group);
        compute_row<C::kDType>(plan.params, plan.outputs, work.batch, row.head, row.query,
                               work.statistic(plan.params, row));
      }
    }
  }
}

// Writes the rows of a warp. `rows`: shared memory for kExchangeColumns floats of each row of the tile.
template <class C, class Storage>
__device__ __forceinline__ void write_rows(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                           float* rows, const Softmax<C, Storage>& softmax,
                                           const Output<C>& output) {
  const AttentionParams& p = plan.params;
  const bool partial = C::kFewQuery && work.splits > 1;
  float factors[C::kStrips][2];
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane.row(strip, half);
      const RowOf row = work.row(r);
      const RowState<float> state{softmax.max[strip][half], softmax.sum[strip][half]};
      float& factor = factors[strip][half] = 1.0f;
      if (r >= work.rows) continue;
      if (!partial) {
        factor = finish_row(plan, work.batch, row.head, work.statistic(p, row), state,
                            softmax.rounded[strip][half], lane.quad == 0);
      } else if (lane.quad == 0) {
        const int64_t at = plan.split_launch.state(p.heads, work.batch, row.head, row.query) + work.split;
        plan.split_launch.max[at] = state.max;
        plan.split_launch.sum[at] = state.sum;
        plan.split_launch.rounding[at] = softmax.rounded[strip][half];
      }
    }
  }
  constexpr int kTilesAtOnce = C::kExchangeColumns / 8;
  const int end = min(lane.first_row + C::kWarpRows, work.rows);
  bool finite = true;
#pragma unroll
  for (int first = 0; first < C::kDimTiles; first += kTilesAtOnce) {
    if (first > 0) __syncwarp();  // the columns before have been read
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors[strip][half];
#pragma unroll
        for (int tile = first; tile < first + kTilesAtOnce && tile < C::kDimTiles; ++tile) {
          const float x = output.at[strip][tile][2 * half], y = output.at[strip][tile][2 * half + 1];
          *reinterpret_cast<float2*>(
              rows + exchanged<C::kExchangeColumns>(lane.row(strip, half), lane.dim(tile - first))) =
              float2{normalised(x, factor), normalised(y, factor)};
        }
      }
    }
    __syncwarp();
    bool written;
    if constexpr (C::kFloat32) {
      written = write_pairs(plan, work, lane, rows, end, first * 8, partial);
    } else {
      written = !partial && plan.out_vectors ? write_chunks(plan, work, lane, rows, end, first * 8)
                                             : write_pairs(plan, work, lane, rows, end, first * 8, partial);
    }
    finite = finite && written;
  }
  if constexpr (C::kBare) write_large_rows(plan, work, lane, softmax);
  if constexpr (kMayOverflow<C::kDType>) {
    if (__all_sync(kWholeWarp, finite)) return;
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < C::kWarpRows; ++n) {
      const int r = Lane<C>().first_row + n;
      if (r >= work.rows) return;
      const RowOf row = work.row(r);
      mend_overflow<C::kDType>(p, plan.outputs, work.batch, row.head, row.query, 0, p.value_dim);
    }
  }
}

}  // namespace selfattn::cuda::mma
