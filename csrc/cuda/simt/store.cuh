// Stores fragments in tensors.
#pragma once

#include "load.cuh"

namespace selfattn::cuda::simt {

// Rows of one batch and head of a result, from `first_row` on.
template <DType kDType>
struct RowTarget {
  using Storage = typename Element<kDType>::Storage;
  using T = typename Element<kDType>::Accumulation;

  Storage* data;
  Storage* residual;  // nullable; the errors of narrowing, narrowed, with the layout of `data`
  int64_t row_stride;
  bool aligned;

  __device__ __forceinline__ RowTarget(const View& view, void* residual_data, int64_t batch, int64_t head,
                                       int64_t first_row = 0)
      : data(static_cast<Storage*>(view.data) + view.offset(batch, head, first_row)),
        residual(residual_data != nullptr
                     ? static_cast<Storage*>(residual_data) + view.offset(batch, head, first_row)
                     : nullptr),
        row_stride(view.stride[2]) {
    const uint64_t bytes = sizeof(StorageVector<kDType>);
    aligned = (reinterpret_cast<uint64_t>(data) | reinterpret_cast<uint64_t>(residual) |
               static_cast<uint64_t>(row_stride) * sizeof(Storage)) %
                  bytes ==
              0;
  }

  // Stores elements column .. column + kVector - 1 of a row that has `columns` elements.
  __device__ __forceinline__ void put(int64_t row, int64_t column, int64_t columns,
                                      const Vector<T>& v) const {
    put_at(row * row_stride + column, columns - column, v);
  }

 protected:
  // Stores the first `count` elements of a vector.
  __device__ __forceinline__ void put_at(int64_t at, int64_t count, const Vector<T>& v) const {
    StorageVector<kDType> stored;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) stored.element[i] = Element<kDType>::narrow(v.element[i]);
    put_stored(data, at, count, stored);
    if (residual == nullptr) return;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      stored.element[i] = Element<kDType>::narrow(v.element[i] - Element<kDType>::widen(stored.element[i]));
    }
    put_stored(residual, at, count, stored);
  }

 private:
  __device__ __forceinline__ void put_stored(Storage* to, int64_t at, int64_t count,
                                             const StorageVector<kDType>& stored) const {
    if (aligned && count >= kVector<T>) {
      *reinterpret_cast<StorageVector<kDType>*>(to + at) = stored;
    } else {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        if (i < count) to[at + i] = stored.element[i];
      }
    }
  }
};

// The dtype of the accumulation type T.
template <class T>
constexpr DType kAccumulation = sizeof(T) == sizeof(double) ? DType::kFloat64 : DType::kFloat32;

// Stores the thread's elements of a tile whose corner is (first_row, first_column), as far as they lie below
// `rows` and `columns`.
template <class T, class Target>
__device__ __forceinline__ void store_fragment(const Target& target, int64_t first_row, int64_t rows,
                                               int64_t first_column, int64_t columns,
                                               const Fragment<T>& fragment) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread<T>; ++r) {
    const int64_t row = first_row + fragment_row<T>(r);
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; c += kVector<T>) {
      const int64_t column = first_column + fragment_column<T>(c);
      if (row >= rows || column >= columns) continue;
      Vector<T> v;
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) v.element[i] = fragment[r][c + i];
      target.put(row, column, columns, v);
    }
  }
}

}  // namespace selfattn::cuda::simt
