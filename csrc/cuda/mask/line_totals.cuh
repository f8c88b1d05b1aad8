// Sums of dS over queries, keys or both, for a mask that is broadcast along them.
//
// A row of dS adds up to 0, so rounding errors may be as large as such a sum. Blocks therefore add up only a
// few tiles in the accumulation type, element by element, and then add the elements to these totals, which
// are float64 for every dtype, like the sums that splits leave. One addition in float64 for each element of
// some tiles costs nothing compared with the tiles' products, on any device.
#pragma once

#include "../common/device.cuh"
#include "mask_regions.h"

namespace selfattn::cuda {

// One total for every row of the tiles or, if the mask has only columns, for every column. The same thread
// adds to a total each time.
class LineTotals {
 public:
  // How many tiles may be added up before add() is called.
  static constexpr int kTiles = 16;

  // `totals` lies in shared memory and has an element for each row and each column.
  __device__ __forceinline__ LineTotals(const MaskRegions& regions, double* totals)
      : regions_(regions), totals_(totals) {
    for (int line = first(); line < lines(); line += step()) totals_[line] = 0.0;
  }

  // Adds the elements at(row, column), the sums over all tiles since the last call.
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

  // All threads must call it before element(), which for a mask of one number is the sum of all totals.
  __device__ __forceinline__ void finish() const {
    if (regions_.kept[2] || regions_.kept[3]) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int line = 1; line < lines(); ++line) totals_[0] += totals_[line];
  }

  // Element `n` of the region. Only thread n modulo the number of threads may ask for it.
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
