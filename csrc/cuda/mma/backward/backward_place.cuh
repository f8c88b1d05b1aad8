// The query and key that elements of a backward tile stand for, and what they see.
#pragma once

#include "../dropout_bits.cuh"
#include "../fragments.cuh"
#include "../place.cuh"
#include "../score_options.cuh"
#include "backward_work.cuh"

namespace selfattn::cuda::mma::backward {

template <class C>
struct Place : PlaceOfWork<C, Plan, Work<C>> {
  static constexpr bool kColumnsAreKeys = C::kOwnsQueries;

  Passing passing;

  // Rows beyond the last stand for the last, so that what is read for them exists.
  __device__ __forceinline__ int existing(int row_of_tile) const {
    return min(row_of_tile, this->work.rows - 1);
  }
  // To be called where rows are queries.
  __device__ __forceinline__ RowOf row(int row_of_tile) const {
    return {passing.head, this->work.first_row + existing(row_of_tile)};
  }
  __device__ __forceinline__ int first_key_of_warp() const { return passing.first + this->lane.first_column; }

  // The query and the key of an element.
  __device__ __forceinline__ RowOf query(int strip, int half, int tile, int i) const {
    return {passing.head,
            this->work.query(passing, existing(this->lane.row(strip, half)), this->lane.column(tile) + i)};
  }
  __device__ __forceinline__ int key(int strip, int half, int tile, int i) const {
    return this->work.key(passing, existing(this->lane.row(strip, half)), this->lane.column(tile) + i);
  }

  // How the map of the call's function sees the tile.
  __device__ __forceinline__ SeenTile seen() const {
    return seen_tile(this->work, this->params().function, passing);
  }

  // The deltas of the tile's queries.
  template <class Shared>
  __device__ __forceinline__ const float* deltas(const Shared& shared) const {
    if constexpr (!C::kReadsDelta) return shared.delta();
    return this->plan.statistics.delta + this->work.own_statistic;
  }

  // The numbers of an element's query and of its right neighbour's, from an array for the tile's queries.
  __device__ __forceinline__ float2 of_queries(const float* numbers, int strip, int half, int tile) const {
    if constexpr (!C::kOwnsQueries)
      return *reinterpret_cast<const float2*>(numbers + this->lane.column(tile));
    const float number = numbers[this->lane.row(strip, half)];
    return {number, number};
  }
};

// The columns of the tile that a row sees, or is seen by, by their positions. A row that does not exist has
// none.
template <class C>
__device__ __forceinline__ Columns visible_columns(const Place<C>& at, int row_of_tile) {
  const Work<C>& work = at.work;
  const int row = work.first_row + row_of_tile - at.passing.first;
  const int begin = C::kOwnsQueries ? row + work.seen_begin : row - work.seen_end + 1;
  int end = C::kOwnsQueries ? row + work.seen_end : row - work.seen_begin + 1;
  end = min(end, work.end - at.passing.first);
  if (row_of_tile >= work.rows) end = 0;
  return {min(max(begin, 0), C::kColumns), min(max(end, 0), C::kColumns)};
}

// How the function's map sees a tile.
template <class C>
__device__ __forceinline__ SeenTile seen_tile(const Work<C>& work, const ScoreFunction& function,
                                              Passing passing) {
  const int columns = work.count(passing);
  return cuda::seen_tile(function, work.batch, passing.head, C::kOwnsQueries ? work.first_row : passing.first,
                         C::kOwnsQueries ? work.rows : columns,
                         C::kOwnsQueries ? passing.first : work.first_row,
                         C::kOwnsQueries ? columns : work.rows);
}

// Whether all rows of the block exist and see, or are seen by, every column of the tile by their positions.
// Windows move with the row: that of the first ends earliest, that of the last begins latest.
template <class C>
__device__ __forceinline__ bool sees_whole_tile(const Place<C>& at) {
  if (at.work.rows < C::kRows) return false;
  const Columns first = visible_columns(at, 0), last = visible_columns(at, C::kRows - 1);
  return first.begin <= 0 && last.begin <= 0 && first.end >= C::kColumns && last.end >= C::kColumns;
}

// The mask's bits in a warp whose rows are keys and whose columns are queries: bit 2 * half + i of four for
// every eight columns.
template <class C>
struct TurnedMaskBits {
  static constexpr int kWords = (C::kColumnTiles + 7) / 8;
  uint32_t of[C::kStrips][kWords];

  // Reads the mask of a tile. Returns whether it shows any of the warp's keys to any query.
  __device__ __forceinline__ bool load(const Place<C>& at) {
    if (!at.plan.mask_chunks || at.lane.first_row + C::kWarpRows > at.work.rows) return load_elements(at);
    uint32_t any = 0;
    with_mask_word(at.params().mask.dtype, [&](const auto& word) { any = load_chunks(at, word); });
    return __any_sync(kWholeWarp, any != 0);
  }

  __device__ __forceinline__ bool shows(int /*quad*/, int strip, int half, int tile, int i) const {
    return of[strip][tile / 8] >> (tile % 8 * 4 + half * 2 + i) & 1u;
  }

 private:
  // Each lane reads the 16 keys of a strip for a query of its own, and the lanes exchange their bits.
  template <class T>
  __device__ __forceinline__ uint32_t load_chunks(const Place<C>& at, const MaskWord<T>& word_of) {
    constexpr int kColumns = C::kColumnTiles * 8;
    const View& mask = at.params().mask;
    const int first_query = at.passing.first + at.lane.first_column;
    uint32_t any = 0;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) of[strip][word] = 0;
      const int key = at.work.first_row + at.lane.first_row + strip * 16;
      const T* const of_keys =
          static_cast<const T*>(mask.data) + mask.offset(at.batch(), at.passing.head, 0) + key;
#pragma unroll
      for (int first = 0; first < kColumns; first += kWarp) {
        const int column = first + at.lane.lane, query = first_query + column;
        const bool exists = column < kColumns && query < at.queries();
        const uint32_t own = exists ? word_of.shown_of_16(of_keys + query * mask.stride[2]) : 0u;
        any |= own;
#pragma unroll
        for (int tile = first / 8; tile < min(first / 8 + 4, C::kColumnTiles); ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t of_query =
                __shfl_sync(kWholeWarp, own, (tile * 8 + at.lane.quad * 2 + i) % kWarp) >> at.lane.group;
            of[strip][tile / 8] |= ((of_query & 1u) | (of_query >> 6 & 4u)) << (tile % 8 * 4 + i);
          }
        }
      }
    }
    return any;
  }

  // Reads two queries at a time, with the keys of a strip across the lanes.
  __device__ __forceinline__ bool load_elements(const Place<C>& at) {
    const View& mask = at.params().mask;
    const int lane = at.lane.lane;
    uint32_t any = 0;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      const int row_of_tile = at.lane.first_row + strip * 16 + (lane & 15);
      const int64_t key = at.work.first_row + at.existing(row_of_tile);
      const int64_t of_key = mask.offset(at.batch(), at.passing.head, 0) + key * mask.stride[3];
      const int first_query = at.passing.first + at.lane.first_column + (lane >> 4);
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        of[strip][word] = 0;
#pragma unroll 1
        for (int tile = word * 8; tile < min(word * 8 + 8, C::kColumnTiles); ++tile) {
#pragma unroll
          for (int quad = 0; quad < 4; ++quad) {
            const int query = first_query + tile * 8 + quad * 2;
            const bool exists = row_of_tile < at.work.rows && query < at.queries();
            const bool shown = exists && !mask_hides(mask, of_key + query * mask.stride[2]);
            const uint32_t votes = __ballot_sync(kWholeWarp, shown);
            any |= votes;
            const uint32_t of_lane = votes >> at.lane.group;
            const uint32_t bits =
                (of_lane & 1u) | (of_lane >> 15 & 2u) | (of_lane >> 6 & 4u) | (of_lane >> 21 & 8u);
            if (quad == at.lane.quad) of[strip][word] |= bits << tile % 8 * 4;
          }
        }
      }
    }
    return any != 0;
  }
};

template <class C, bool kColumnsAreKeys = C::kOwnsQueries>
struct MaskBits : TurnedMaskBits<C> {};

template <class C>
struct MaskBits<C, true> : mma::MaskBits<C::kStrips, C::kWarpColumns> {};

}  // namespace selfattn::cuda::mma::backward
