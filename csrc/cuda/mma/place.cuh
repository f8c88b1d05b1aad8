// Which query and key the elements of a tile of scores stand for.
//
// Options ask a kernel for its Place and nothing else. The backward has a Place of its own, whose rows may be
// keys. Rows that a Place names exist; the options leave alone columns beyond the last.
#pragma once

#include "../function/function_tile.cuh"
#include "fragments.cuh"
#include "work.cuh"

namespace selfattn::cuda::mma {

// The part that the Places of forward and backward share.
template <class C, class AnyPlan, class AnyWork>
struct PlaceOfWork {
  static constexpr bool kFloat32 = C::kFloat32;

  const AnyPlan& plan;
  const AnyWork& work;
  const Lane<C>& lane;

  __device__ __forceinline__ const AttentionParams& params() const { return plan.params; }
  __device__ __forceinline__ int batch() const { return work.batch; }
  __device__ __forceinline__ int queries() const { return work.queries; }
  __device__ __forceinline__ int keys() const { return work.keys; }
  __device__ __forceinline__ int64_t query_offset() const { return work.query_offset; }
};

// The forward's Place: rows are queries, columns keys.
template <class C>
struct Place : PlaceOfWork<C, Plan, Work<C>> {
  static constexpr bool kColumnsAreKeys = true;

  int first_key;

  __device__ __forceinline__ RowOf row(int row_of_tile) const { return this->work.row(row_of_tile); }
  __device__ __forceinline__ int first_key_of_warp() const { return first_key + this->lane.first_column; }

  // How the map of the call's function sees the tile.
  __device__ __forceinline__ SeenTile seen() const {
    return seen_tile(this->work, this->params().function, first_key);
  }

  // The query (a row here) and the key of an element.
  __device__ __forceinline__ RowOf query(int strip, int half, int /*tile*/, int /*i*/) const {
    return row(this->lane.row(strip, half));
  }
  __device__ __forceinline__ int key(int /*strip*/, int /*half*/, int tile, int i) const {
    return first_key + this->lane.column(tile) + i;
  }
};

}  // namespace selfattn::cuda::mma
