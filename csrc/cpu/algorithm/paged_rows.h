// Keys and values in pages, as the algorithms take them: decoding by the addresses of their rows, everything
// else a block at a time from a copy. Where there are no pages, both are the tensor itself.
#pragma once

#include "thin_product.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Neighbouring rows within a page.
struct PageRun {
  const char* first;
  int64_t rows;
};

// The run that starts at a key, of at most `most` rows; without pages of as many.
inline PageRun page_run(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head,
                        int64_t key, int64_t most) {
  const int64_t rest = p.pages.table != nullptr ? p.pages.size - key % p.pages.size : most;
  const void* first = element(view.data, p.dtype, offset_of_key(view, p.pages, batch, kv_head, key));
  return {static_cast<const char*>(first), most < rest ? most : rest};
}

// The rows of keys key .. key + keys - 1 of a view of keys or values, listed where the call has `addresses`:
// with room for kMostRowsAhead more, which are the rows that follow, or the last one again.
inline ThinRows thin_rows(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head,
                          int64_t key, int64_t keys, const char** addresses) {
  if (addresses == nullptr) {
    return {p.dtype, element(view.data, p.dtype, view.offset(batch, kv_head, key)), view.stride[2], nullptr,
            nullptr};
  }
  const int64_t step = view.stride[2] * size_of(p.dtype), rest = p.keys - key;
  const int64_t listed = rest < keys + kMostRowsAhead ? rest : keys + kMostRowsAhead;
  for (int64_t j = 0; j < listed;) {
    const PageRun run = page_run(p, view, batch, kv_head, key + j, listed - j);
    for (int64_t i = 0; i < run.rows; ++i) addresses[j + i] = run.first + i * step;
    j += run.rows;
  }
  for (int64_t j = listed; j < keys + kMostRowsAhead; ++j) addresses[j] = addresses[listed - 1];
  const int64_t bytes = p.head_dim * size_of(p.dtype);
  const int64_t ahead = bytes * kMostRowsAhead <= kBytesAhead ? kMostRowsAhead : kBytesAhead / bytes + 1;
  return {p.dtype, nullptr, 0, addresses, addresses + ahead};
}

// Room for the rows of a block, in bytes.
inline int64_t block_bytes(const AttentionParams& p, int64_t rows, int64_t columns) {
  return p.pages.table != nullptr ? Arena::bytes_for<char>(rows * columns * size_of(p.dtype)) : 0;
}

// Rows of a view of keys or values, copied to `block` if they lie in pages.
inline RowSource key_source(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head,
                            int64_t key, int64_t keys, int64_t columns, char* block) {
  if (p.pages.table == nullptr) return row_source(view, p.dtype, batch, kv_head, key, keys, columns);
  const int64_t bytes = columns * size_of(p.dtype), step = view.stride[2] * size_of(p.dtype);
  char* to = block;
  for (int64_t j = 0; j < keys;) {
    const PageRun run = page_run(p, view, batch, kv_head, key + j, keys - j);
    for (int64_t i = 0; i < run.rows; ++i, to += bytes) {
      memcpy(to, run.first + i * step, static_cast<size_t>(bytes));
    }
    j += run.rows;
  }
  return {block, p.dtype, columns, keys, columns};
}

}  // namespace selfattn::cpu::SELFATTN_ISA
