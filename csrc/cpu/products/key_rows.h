// Rows of keys and values, which lie a stride apart or in pages. Decoding reads them where they are;
// everything else takes a block at a time, from a copy if there are pages.
#pragma once

#include "arena.h"
#include "tensor_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Rows `step` bytes apart.
struct RowRun {
  const char* first;
  int64_t rows;
  int64_t step;
};

// Returns the rows of a view of keys or values that lie evenly spaced from a key on, at most `most`.
inline RowRun key_run(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head, int64_t key,
                      int64_t most) {
  const int64_t rest = p.pages.table != nullptr ? p.pages.size - key % p.pages.size : most;
  const void* first = element(view.data, p.dtype, offset_of_key(view, p.pages, batch, kv_head, key));
  return {static_cast<const char*>(first), smaller(most, rest), view.stride[2] * size_of(p.dtype)};
}

// Bytes of the copy of a block's rows; 0 without pages.
inline int64_t block_bytes(const AttentionParams& p, int64_t rows, int64_t columns) {
  return p.pages.table != nullptr ? Arena::bytes_for<char>(rows * columns * size_of(p.dtype)) : 0;
}

// Returns rows of a view of keys or values, copied to `block` if they lie in pages.
SELFATTN_OUT_OF_LINE inline RowSource key_source(const AttentionParams& p, const View& view, int64_t batch,
                                                 int64_t kv_head, int64_t key, int64_t keys, int64_t columns,
                                                 char* block) {
  if (p.pages.table == nullptr) return row_source(view, p.dtype, batch, kv_head, key, keys, columns);
  const int64_t bytes = columns * size_of(p.dtype);
  char* to = block;
  for (int64_t j = 0; j < keys;) {
    const RowRun run = key_run(p, view, batch, kv_head, key + j, keys - j);
    for (int64_t i = 0; i < run.rows; ++i, to += bytes) {
      memcpy(to, run.first + i * run.step, static_cast<size_t>(bytes));
    }
    j += run.rows;
  }
  return {block, p.dtype, columns, keys, columns};
}

}  // namespace selfattn::cpu::SELFATTN_ISA
