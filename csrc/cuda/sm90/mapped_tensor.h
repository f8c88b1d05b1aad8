// Tensors of a call as tensor maps, by which TMA copies them. Plain C++.
#pragma once

#include "../../core/attention_params.h"
#include "../common/tensor_map.h"

namespace selfattn::cuda::sm90 {

// A dimension along which the tensor does not change has size 1 in the map, and 0 steps here.
struct MappedTensor {
  TensorMap map;
  int steps_of_head = 1;
  int steps_of_batch = 1;
};

// Whether a tensor map can describe a view. It cannot describe repeated rows (a stride of 0).
bool is_mappable(const View& view, int64_t rows, int64_t columns);

// Maps of tensors whose rows are queries or keys, to be copied in boxes of `box_rows` rows by 64 columns. The
// maps of packed tensors have all rows of all sequences, and those of pages have all pages.
MappedTensor mapped_queries(const AttentionParams& params, const View& view, int64_t columns,
                            int64_t box_rows);
MappedTensor mapped_keys(const AttentionParams& params, const View& view, int64_t columns, int64_t box_rows);

}  // namespace selfattn::cuda::sm90
