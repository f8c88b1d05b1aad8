// The arguments of appending to a cache: new keys and values, and where each of them goes. They are plain
// data only. csrc/ops fills the structure after checking every argument.
#pragma once

#include "attention_params.h"

namespace selfattn {

struct AppendParams {
  int64_t batch = 0;
  int64_t kv_heads = 0;
  int64_t rows = 0;      // new rows of each sequence; if packed, of all together
  int64_t capacity = 0;  // positions of a sequence: rows of the cache, or of all pages that a table row names
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  DType dtype = DType::kFloat32;

  View key;          // (batch, kv_heads, rows, head_dim), packed (1, kv_heads, rows, head_dim); last stride 1
  View value;        // the same with value_dim
  View key_cache;    // (batch, kv_heads, capacity, head_dim) or pages; last stride 1
  View value_cache;  // the same with value_dim

  const int64_t* row_starts = nullptr;  // nullable; (batch + 1): where the packed rows of a sequence start
  const int64_t* lengths = nullptr;     // (batch)
  bool lengths_after = false;           // whether the lengths count the new rows
  Pages pages;                          // a null table means that the cache is contiguous

  SELFATTN_HOST_DEVICE int64_t rows_of(int64_t b) const {
    return row_starts == nullptr ? rows : row_starts[b + 1] - row_starts[b];
  }
  // Returns the position that the first new row of a sequence gets.
  SELFATTN_HOST_DEVICE int64_t first_position(int64_t b) const {
    return lengths[b] - (lengths_after ? rows_of(b) : 0);
  }
};

}  // namespace selfattn
