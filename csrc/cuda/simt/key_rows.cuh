// The rows of a sequence's keys or values, which lie in a tensor or in pages.
#pragma once

#include "../common/sequence.cuh"
#include "load.cuh"

namespace selfattn::cuda::simt {

// A RowSource whose rows may lie in pages. For a row behind the sequence's last it finds the last, because
// the table may end there.
template <DType kDType>
struct KeyRows : RowSource<kDType> {
  using Storage = typename Element<kDType>::Storage;

  Pages pages;  // has no table if the rows are neighbours
  int64_t batch, page_stride, last_row;

  __device__ __forceinline__ KeyRows(const View& view, const Pages& of_pages, const Sequence& sequence,
                                     int64_t kv_head)
      : RowSource<kDType>(view, of_pages.table != nullptr ? 0 : sequence.key_batch, kv_head,
                          sequence.first_key),
        pages(of_pages),
        batch(sequence.batch),
        page_stride(view.stride[0]),
        last_row(sequence.keys - 1) {
    if (pages.table == nullptr) return;
    const uint64_t page_bytes = static_cast<uint64_t>(page_stride) * sizeof(Storage);
    this->aligned = this->aligned && page_bytes % sizeof(StorageVector<kDType>) == 0;
  }

  __device__ __forceinline__ const Storage* find(int64_t row, int64_t column) const {
    if (pages.table == nullptr) return RowSource<kDType>::find(row, column);
    row = min(row, last_row);
    const PagedRow at = paged_row(pages, batch, row);
    return this->data + at.page * page_stride + at.row * this->row_stride + column;
  }
  __device__ __forceinline__ const Storage* find_next(const Storage* from, int64_t row, int more,
                                                      int64_t column) const {
    if (pages.table == nullptr) return RowSource<kDType>::find_next(from, row, more, column);
    return find(row + more, column);
  }
};

}  // namespace selfattn::cuda::simt
