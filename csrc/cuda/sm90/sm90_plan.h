// The plan of an sm90 forward launch: the common plan, and what the producer copies. Plain C++.
#pragma once

#include "../mma/forward_plan.h"
#include "mapped_tensor.h"

namespace selfattn::cuda::sm90 {

// The tensors that the producer copies, and how.
struct Copies {
  MappedTensor query, key, value;
  unsigned long long* next_item = nullptr;  // on the device: the item of work that a block takes next
  // Boxes of keys or values: several if a tile has several pages, 0 if boxes do not fit the pages.
  int boxes_per_tile = 1;
  bool zeros_follow = false;  // after the last key of every sequence
};

// `blocks` of the common plan counts items of work here, which resident blocks take one after another.
struct Plan : Copies, mma::Plan {};

// Above this dim, outputs and scores leave no registers for what options need.
constexpr int kMostDimWithOptions = 192;

// Whether tensor maps can describe the tensors of a call.
bool can_be_mapped(const AttentionParams& params);

Plan plan_forward(const AttentionParams& params, const ForwardOutputs& outputs, const mma::TileShape& tile,
                  void* workspace);

// It begins with what sm80 needs for sequences of few queries.
size_t forward_workspace(const AttentionParams& params);

}  // namespace selfattn::cuda::sm90
