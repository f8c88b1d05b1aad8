// The product of two panels: fragment(r, c) += Σ_k left(k, row r) · right(k, column c).
#pragma once

#include "load.cuh"

namespace selfattn::cuda::simt {

// Weights of keys that a query may not see are stored as -0. No weight is negative, so the sign can
// distinguish them from weights that are 0 because of their size or because of dropout. The difference
// matters if a value is infinite or NaN: it must not reach the output if its key is hidden, and it must if
// its key is visible.
__device__ __forceinline__ bool is_hidden(float weight) { return bits_from_float(weight) == 0x80000000u; }
__device__ __forceinline__ bool is_hidden(double weight) {
  uint64_t bits;
  memcpy(&bits, &weight, sizeof(bits));
  return bits == 0x8000000000000000u;
}

template <class T>
__device__ __forceinline__ void clear(Fragment<T>& fragment) {
  for_each_number<T>([&](int r, int c) { fragment[r][c] = T(0); });
}

// `steps` is rounded up to whole vectors. kSkipHidden leaves out the products of hidden weights in the left
// operand.
template <class T, bool kSkipHidden = false>
__device__ __forceinline__ void multiply(const T* left, const T* right, int steps, Fragment<T>& fragment) {
  constexpr int kV = kVector<T>;
  constexpr int kRowVectors = kRowsPerThread<T> / kV, kColumnVectors = kColumnsPerThread / kV;
#pragma unroll 1
  for (int first = 0; first < steps; first += kV) {
#pragma unroll(kSkipHidden ? 1 : kV)
    for (int i = 0; i < kV; ++i) {
      const int k = first + i;
      Vector<T> rows[kRowVectors], columns[kColumnVectors];
#pragma unroll
      for (int v = 0; v < kRowVectors; ++v) {
        rows[v] =
            *reinterpret_cast<const Vector<T>*>(left + panel_index<T, kRows<T>>(k, fragment_row<T>(v * kV)));
      }
#pragma unroll
      for (int v = 0; v < kColumnVectors; ++v) {
        columns[v] = *reinterpret_cast<const Vector<T>*>(
            right + panel_index<T, kColumns>(k, fragment_column<T>(v * kV)));
      }
#pragma unroll
      for (int r = 0; r < kRowsPerThread<T>; ++r) {
        const T x = rows[r / kV].element[r % kV];
        if (kSkipHidden && is_hidden(x)) continue;
#pragma unroll
        for (int c = 0; c < kColumnsPerThread; ++c) {
          fragment[r][c] = multiply_add(x, columns[c / kV].element[c % kV], fragment[r][c]);
        }
      }
    }
  }
}

// out += weights · rows, for the columns of the rows from `column` on. `weights` is a panel of kColumns
// steps, one for each row. Products of hidden weights are left out if the rows hold NaN or infinities, unless
// kAllVisible says that there are no hidden weights. All threads must call it; only warps that have rows of
// the result multiply.
template <DType kDType, bool kAllVisible = false, class Source, class T>
__device__ __forceinline__ void add_weighted(const T* weights, T* columns_panel, const RowRange<Source>& rows,
                                             int64_t column, int64_t columns, bool has_rows,
                                             Fragment<T>& out) {
  // Each tile is summed up separately and then added, so that the errors of a long sum stay small.
  Fragment<T> part;
  clear<T>(part);
  for (int step = 0; step < kColumns && rows.first + step < rows.end; step += kDepth<T>) {
    __syncthreads();  // all threads have finished with the panel
    const bool odd =
        load_rows<kDType>(columns_panel, rows.source, rows.first + step, rows.end, column, columns);
    const bool skip_hidden = __syncthreads_or(odd);
    const T* const left = weights + panel_size<kRows<T>>(step);
    const int steps = smaller(rows.end - rows.first - step, kDepth<T>);
    if (!kAllVisible && has_rows && skip_hidden) {
      multiply<T, true>(left, columns_panel, steps, part);
    } else if (has_rows) {
      multiply<T>(left, columns_panel, steps, part);
    }
  }
  for_each_number<T>([&](int r, int c) { out[r][c] += part[r][c]; });
}

}  // namespace selfattn::cuda::simt
