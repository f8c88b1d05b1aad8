// The inverse of selected keys: from a block of keys to the rows of the selection that hold it.
#pragma once

#include "../../core/attention_params.h"
#include "../../core/integers.h"
#include "../common/launch.h"

namespace selfattn::cuda::simt {

// The lists of each batch element and head that has lists of its own have an inverse, which is a unit of
// these arrays. They lie on the device.
struct InverseLists {
  int64_t units, heads;  // of all batch elements, and of one
  int64_t blocks;        // of keys
  int64_t numbers;       // of a unit's lists, those that count for nothing among them
  int64_t chunks;        // of a unit's rows, which are counted side by side
  int64_t* starts;       // [units][blocks + 1]: where a block's rows begin; they end where the next one's do
  int64_t* places;       // [units][chunks][blocks]: for build_inverse_lists alone
  int32_t* rows;         // [units][numbers]: the rows of each block, ascending

  SELFATTN_HOST_DEVICE int64_t unit_of(const Selection& s, int64_t batch, int64_t head) const {
    return (s.stride[0] != 0 ? batch * heads : 0) + (s.stride[1] != 0 ? head / s.heads_per_list : 0);
  }
};

size_t inverse_lists_bytes(const AttentionParams& params);

// `memory` has inverse_lists_bytes() and is 256-byte aligned.
InverseLists inverse_lists_in(void* memory, const AttentionParams& params);

// Fills the arrays. Numbers of blocks that do not exist are left out.
void build_inverse_lists(const Selection& selection, const InverseLists& lists, const Launch& where);

}  // namespace selfattn::cuda::simt
