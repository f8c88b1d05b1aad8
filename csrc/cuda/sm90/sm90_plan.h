// What a launch of a forward kernel of sm90 is told. Plain C++, filled on the host.
#pragma once

#include "../mma/forward_plan.h"
#include "mapped_tensor.h"

namespace selfattn::cuda::sm90 {

// What the producer needs beside the call and its division.
struct Copies {
  MappedTensor query, key, value;
  unsigned long long* next_item = nullptr;  // on the device: the item of work that a block takes next
  // Of keys or values: several where a tile has several pages, 0 where boxes do not fit the pages.
  int boxes_per_tile = 1;
  bool zeros_follow = false;  // behind the last key of every sequence
};

// Its blocks are items of work here.
struct Plan : Copies, mma::Plan {};

// Above it, outputs and scores leave no registers for what options need.
constexpr int kMostDimWithOptions = 192;

// Whether tensor maps can describe the tensors of a call.
bool can_be_mapped(const AttentionParams& params);

Plan plan_forward(const AttentionParams& params, const ForwardOutputs& outputs, const mma::TileShape& tile,
                  void* workspace);

// With what sm80 needs for sequences of few queries, which comes first.
size_t forward_workspace(const AttentionParams& params);

}  // namespace selfattn::cuda::sm90
