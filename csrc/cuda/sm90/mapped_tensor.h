// Tensors as copies by tensor maps see them. Plain C++.
#pragma once

#include "../../core/attention_params.h"
#include "../common/tensor_map.h"

namespace selfattn::cuda::sm90 {

// A dimension along which the tensor does not change has the size 1 in the map, and 0 steps here.
struct MappedTensor {
  TensorMap map;
  int steps_of_head = 1;
  int steps_of_batch = 1;
};

// Whether a tensor map can describe it. Rows that are repeated (a stride of 0) have none.
bool is_mappable(const View& view, int64_t rows, int64_t columns);

// One that has rows for queries or for keys, to be copied in boxes of so many rows by 64 columns. Of packed
// sequences and of pages the map's dimensions are the tensor's: all rows of one, and all pages.
MappedTensor mapped_queries(const AttentionParams& params, const View& view, int64_t columns,
                            int64_t box_rows);
MappedTensor mapped_keys(const AttentionParams& params, const View& view, int64_t columns, int64_t box_rows);

}  // namespace selfattn::cuda::sm90
