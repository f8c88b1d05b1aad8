// Sums of dS over the queries, the keys or both, where a mask does not tell these apart. A row of dS adds up
// to 0, so what roundings take from such a sum may be all that is left of it. Blocks therefore add up a few
// tiles only in the accumulation type, element by element; then the elements meet the totals here, which are
// float64 in every dtype, as are the sums that splits leave. An addition in float64 for each element of some
// tiles costs nothing beside the tiles' products, whatever the device.
#pragma once

#include "../common/device.cuh"
#include "mask_regions.h"

namespace selfattn::cuda {

// A total for every row of the tiles or, where the mask has columns only, for every column. The same thread
// adds to it each time.
class LineTotals {
 public:
  // Tiles whose elements may be added up before they meet the totals.
  static constexpr int kTiles = 16;

  // `totals` lies in shared memory and has an element for each row and each column.
  __device__ __forceinline__ LineTotals(const MaskRegions& regions, double* totals)
      : regions_(regions), totals_(totals) {
    for (int line = first(); line < lines(); line += step()) totals_[line] = 0.0;
  }

  // Adds the elements at(row, column) of all tiles since the last time.
  template <class At>
  __device__ __forceinline__ void add(const At& at) const {
    const bool columns = !has_rows();
    const int length = columns ? regions_.tile_rows : regions_.tile_columns;
#pragma unroll 1
    for (int line = first(); line < lines(); line += step()) {
      double total = 0.0;
#pragma unroll 4
      for (int n = 0; n < length; ++n) {
        total += static_cast<double>(columns ? at(n, line) : at(line, n));
      }
      totals_[line] += total;
    }
  }

  // To be called by all threads before elements of a mask that is one number are asked for.
  __device__ __forceinline__ void finish() const {
    if (regions_.kept[2] || regions_.kept[3]) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int line = 1; line < lines(); ++line) totals_[0] += totals_[line];
  }

  // Element `n` of the region, for the threads n, n + the block's threads and so on.
  __device__ __forceinline__ double element(int n) const { return totals_[n]; }

 private:
  __device__ __forceinline__ bool has_rows() const { return regions_.kept[2] || !regions_.kept[3]; }
  __device__ __forceinline__ int lines() const {
    return has_rows() ? regions_.tile_rows : regions_.tile_columns;
  }
  static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int step() { return static_cast<int>(blockDim.x); }

  const MaskRegions& regions_;
  double* const totals_;
};

}  // namespace selfattn::cuda
