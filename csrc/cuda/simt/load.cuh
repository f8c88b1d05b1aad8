// Loads panels of shared memory from tensors.
//
// Elements are converted to the accumulation type and transposed if necessary. Beyond the edges there are
// zeros.
#pragma once

#include "../common/element.cuh"
#include "../common/elementary.cuh"
#include "tile.cuh"

namespace selfattn::cuda::simt {

// kVector elements in the accumulation type.
template <class T>
struct alignas(16) Vector {
  T element[kVector<T>];
};

// kVector elements as a tensor stores them, which are loaded at once if the tensor's rows are aligned.
template <DType kDType>
struct alignas(sizeof(typename Element<kDType>::Storage) * kVector<typename Element<kDType>::Accumulation>)
    StorageVector {
  typename Element<kDType>::Storage element[kVector<typename Element<kDType>::Accumulation>];
};

// Rows of one batch and head, from `first_row` on. The elements of a row are neighbours, and rows are
// `row_stride` elements apart.
template <DType kDType>
struct RowSource {
  using Storage = typename Element<kDType>::Storage;
  using T = typename Element<kDType>::Accumulation;

  const Storage* data;
  int64_t row_stride;
  bool aligned;  // whether vectors can be loaded from any row, at multiples of kVector

  __device__ __forceinline__ RowSource(const View& view, int64_t batch, int64_t head, int64_t first_row = 0)
      : data(static_cast<const Storage*>(view.data) + view.offset(batch, head, first_row)),
        row_stride(view.stride[2]) {
    const uint64_t row_bytes = static_cast<uint64_t>(row_stride) * sizeof(Storage);
    aligned = (reinterpret_cast<uint64_t>(data) | row_bytes) % sizeof(StorageVector<kDType>) == 0;
  }

  // The address of `row`, and of the row `more` behind it.
  __device__ __forceinline__ const Storage* find(int64_t row, int64_t column) const {
    return data + row * row_stride + column;
  }
  __device__ __forceinline__ const Storage* find_next(const Storage* from, int64_t, int more, int64_t) const {
    return from + more * row_stride;
  }

  // The first `count` elements of a vector at `at`, followed by zeros.
  __device__ __forceinline__ Vector<T> vector(const Storage* at, int count) const {
    Vector<T> v;
    if (aligned && count >= kVector<T>) {
      const StorageVector<kDType> stored = *reinterpret_cast<const StorageVector<kDType>*>(at);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) v.element[i] = Element<kDType>::widen(stored.element[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) v.element[i] = i < count ? Element<kDType>::widen(at[i]) : T(0);
    }
    return v;
  }
};

// The rows first .. end - 1 of a source.
template <class Source>
struct RowRange {
  const Source& source;
  int64_t first, end;
};
template <class Source>
RowRange(const Source&, int64_t, int64_t) -> RowRange<Source>;

__device__ __forceinline__ int smaller(int64_t n, int limit) {
  return n < limit ? static_cast<int>(n) : limit;
}

// Returns NaN if an element is infinite or NaN, otherwise 0: x * 0 is NaN for such an x, and NaN survives
// addition.
template <class T>
__device__ __forceinline__ T not_finite_as_nan(const Vector<T>& v) {
  T sum = T(0);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) sum = multiply_add(v.element[i], T(0), sum);
  return sum;
}

// A permutation of rows by moving bits: every two successive groups of kV rows lie 4 * kV apart.
template <int kV>
__host__ __device__ __forceinline__ constexpr int spread_row(int row) {
  return row % kV + row / kV % 2 * (4 * kV) + row / (2 * kV) % 4 * kV + row / (8 * kV) * (8 * kV);
}

// panel(k, x) = source(first_row + x, first_column + k) for x < kWidth and k < kDepth. Steps from `columns`
// on are zero up to a whole vector, and are not written beyond that. Rows from `rows` on are zero.
template <DType kDType, int kWidth, class Source, class T>
__device__ __forceinline__ void load_transposed(T* panel, const Source source, int64_t first_row,
                                                int64_t rows, int64_t first_column, int64_t columns) {
  // A warp loads eight rows of four neighbouring vectors, which are whole sectors of memory. The rows are two
  // groups of kVector that lie 4 * kVector apart, so that with the gaps of four vectors every bank is used
  // once.
  constexpr int kV = kVector<T>;
  constexpr int kRowsAtOnce = kThreads / (kDepth<T> / kV);
  const int thread = static_cast<int>(threadIdx.x);
  const int k = (thread % 4 + thread / 32 % 2 * 4) * kV;
  const int own_row = thread / 4 % 8 + thread / 64 * 8;
  const int own_x = spread_row<kV>(own_row);
  const int rows_left = smaller(rows - first_row, kWidth) - own_x;
  const int columns_left = smaller(columns - first_column, kDepth<T>) - k;
  if (columns_left <= 0) return;
  const auto* const at = source.find(first_row + own_x, first_column + k);
  T* const to = panel + panel_index<T, kWidth>(k, own_x);
#pragma unroll
  for (int i = 0; i < kWidth; i += kRowsAtOnce) {
    const int x = spread_row<kV>(i);
    const auto* const from = source.find_next(at, first_row + own_x, x, first_column + k);
    const Vector<T> v = source.vector(from, x < rows_left ? columns_left : 0);
#pragma unroll
    for (int e = 0; e < kV; ++e) to[panel_index<T, kWidth>(e, x)] = v.element[e];
  }
}

// panel(k, x) = source(first_row + k, first_column + x) for k < kDepth and x < kWidth, and zeros beyond
// `rows` and `columns`. Returns whether this thread loaded anything infinite or NaN.
template <DType kDType, int kWidth = kColumns, class Source, class T>
__device__ __forceinline__ bool load_rows(T* panel, const Source source, int64_t first_row, int64_t rows,
                                          int64_t first_column, int64_t columns) {
  constexpr int kVectors = kWidth / kVector<T>;
  const int own_k = static_cast<int>(threadIdx.x) / kVectors;
  const int x = static_cast<int>(threadIdx.x) % kVectors * kVector<T>;
  const int rows_left = smaller(rows - first_row, kDepth<T>) - own_k;
  const int columns_left = smaller(columns - first_column, kWidth) - x;
  const auto* const at = source.find(first_row + own_k, first_column + x);
  T* const to = panel + panel_index<T, kWidth>(own_k, x);
  T sum = T(0);
#pragma unroll
  for (int i = 0; i < kDepth<T>; i += kThreads / kVectors) {
    const auto* const from = source.find_next(at, first_row + own_k, i, first_column + x);
    const Vector<T> v = source.vector(from, i < rows_left ? columns_left : 0);
    sum += not_finite_as_nan(v);
    *reinterpret_cast<Vector<T>*>(to + panel_index<T, kWidth>(i, 0)) = v;
  }
  return sum != T(0);
}

}  // namespace selfattn::cuda::simt
