// Folded rows: the queries of several heads that share keys and values.
//
// They are for sequences with few queries. The queries of one head follow those of another, so that keys and
// values are read once for all of them.
#pragma once

#include "../common/score_tile.cuh"
#include "../split/split_keys.h"
#include "store.cuh"

namespace selfattn::cuda::simt {

// The folded rows of tensors like the query, from query 0 of the first head on.
template <DType kDType>
struct FoldedSource : RowSource<kDType> {
  using Storage = typename Element<kDType>::Storage;

  FoldedRows rows;
  int64_t head_stride;

  __device__ __forceinline__ FoldedSource(const View& view, int64_t batch, int64_t head, int64_t first_row,
                                          FoldedRows of)
      : RowSource<kDType>(view, batch, head, first_row), rows(of), head_stride(view.stride[1]) {
    const uint64_t head_bytes = static_cast<uint64_t>(head_stride) * sizeof(Storage);
    this->aligned = this->aligned && head_bytes % sizeof(StorageVector<kDType>) == 0;
  }

  __device__ __forceinline__ const Storage* find(int64_t row, int64_t column) const {
    const HeadRow at = rows.of(static_cast<int>(row));
    return RowSource<kDType>::find(at.query, at.head * head_stride + column);
  }
  __device__ __forceinline__ const Storage* find_next(const Storage*, int64_t row, int more,
                                                      int64_t column) const {
    return find(row + more, column);
  }
};

// The folded rows of a result.
template <DType kDType>
struct FoldedTarget : RowTarget<kDType> {
  using typename RowTarget<kDType>::T;

  FoldedRows rows;
  int64_t head_stride;

  __device__ __forceinline__ FoldedTarget(const View& view, void* residual_data, int64_t batch, int64_t head,
                                          int64_t first_row, FoldedRows of)
      : RowTarget<kDType>(view, residual_data, batch, head, first_row),
        rows(of),
        head_stride(view.stride[1]) {
    const uint64_t head_bytes =
        static_cast<uint64_t>(head_stride) * sizeof(typename Element<kDType>::Storage);
    this->aligned = this->aligned && head_bytes % sizeof(StorageVector<kDType>) == 0;
  }

  __device__ __forceinline__ void put(int64_t row, int64_t column, int64_t columns,
                                      const Vector<T>& v) const {
    const HeadRow at = rows.of(static_cast<int>(row));
    this->put_at(at.head * head_stride + at.query * this->row_stride + column, columns - column, v);
  }
};

// The scores of folded rows, with the interface of ScoreTile, which has rows of one head.
template <class T>
class FoldedTile {
 public:
  __device__ __forceinline__ FoldedTile(const AttentionParams& params, const Sequence& of, int64_t head,
                                        FoldedRows numbers, int rows)
      : p(params),
        sequence_(of),
        first_head_(head),
        numbers_(numbers),
        rows_(rows),
        first_(params, of, head, 0) {}

  __device__ __forceinline__ void move_to(int64_t first_key) {
    first_key_ = first_key;
    first_.move_to(first_key);
  }

  // The queries are the same in every head.
  __device__ __forceinline__ bool window_covers(int, int columns) const {
    return first_.window_covers(static_cast<int>(kFewQueries), columns);
  }
  // The other heads have slopes of their own.
  __device__ __forceinline__ bool is_bare() const {
    return first_.is_bare() && p.alibi_slopes.data == nullptr;
  }
  __device__ __forceinline__ bool has_mask() const { return first_.has_mask(); }
  __device__ __forceinline__ T scaled(T dot) const { return first_.scaled(dot); }

  __device__ __forceinline__ bool window_shows(int row, int column) const {
    return row < rows_ && first_.window_shows(query_of(row), column);
  }
  __device__ __forceinline__ bool mask_shows(int row, int column) const {
    return of_head(row).mask_shows(query_of(row), column);
  }
  __device__ __forceinline__ T score(int row, int column, T dot) const {
    return window_shows(row, column) ? of_head(row).score_in_window(query_of(row), column, dot)
                                     : -infinity<T>();
  }

 private:
  __device__ __forceinline__ int query_of(int row) const { return static_cast<int>(numbers_.of(row).query); }
  __device__ __forceinline__ ScoreTile<T> of_head(int row) const {
    ScoreTile<T> tile(p, sequence_, first_head_ + numbers_.of(row).head, 0);
    tile.move_to(first_key_);
    return tile;
  }

  const AttentionParams& p;
  const Sequence& sequence_;
  const int64_t first_head_;
  const FoldedRows numbers_;
  const int rows_;
  ScoreTile<T> first_;  // of the first head
  int64_t first_key_ = 0;
};

}  // namespace selfattn::cuda::simt
