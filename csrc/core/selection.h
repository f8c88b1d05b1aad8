// Selected keys: the lists of blocks of keys that the queries of a call see, and no others.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace selfattn {

// A list holds numbers of blocks of key_size neighbouring keys, ascending and each once; numbers below 0 end
// it. Keys past the last one do not exist. Lists hide keys as a mask does: windows and masks hide more.
struct Selection {
  const int32_t* lists = nullptr;  // null: every key is selected. (batch, heads, rows, longest), rows dense
  int64_t stride[2] = {0, 0};      // batch, head; 0 where they share lists
  int64_t rows = 0;                // a row is the list of query_size neighbouring queries
  int64_t longest = 0;             // numbers in a row
  int64_t query_size = 1, key_size = 1;
  int64_t heads_per_list = 1;  // so many neighbouring query heads share lists
  // Elements of a batch whose tiles are made otherwise (goes_by_blocks) are left to another kernel.
  enum class Tiles : uint8_t { kAny, kOfBlocks, kOfHeads } tiles = Tiles::kAny;

  SELFATTN_HOST_DEVICE const int32_t* row(int64_t batch, int64_t head, int64_t row_index) const {
    return lists + batch * stride[0] + head / heads_per_list * stride[1] + row_index * longest;
  }
  // Returns the numbers of a row that count.
  SELFATTN_HOST_DEVICE int64_t length_of(const int32_t* row) const {
    int64_t length = 0;
    while (length < longest && row[length] >= 0) ++length;
    return length;
  }
};

}  // namespace selfattn
