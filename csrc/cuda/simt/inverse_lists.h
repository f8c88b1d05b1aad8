// The inverse of selected keys: from a block of keys to the rows of the selection that hold it.
#pragma once

#include "../../core/sequences.h"
#include "../common/launch.h"

namespace selfattn::cuda::simt {

// The inverses of all lists, in arrays on the device. An inverse is that of the lists of a batch element and
// a head, as far as they have lists of their own: see InverseOfHead.
struct InverseLists {
  int64_t elements, heads;                  // that have lists of their own
  int64_t chunks;                           // of the rows of an inverse, which are counted side by side
  int64_t starts_of_head, numbers_of_head;  // of all elements
  int64_t* starts;                          // [heads][starts_of_head]
  int64_t* places;                          // [heads][starts_of_head][chunks]: for build_inverse_lists alone
  int32_t* rows;                            // [heads][numbers_of_head]
};

// One of the inverses. Those of packed sequences follow each other as the sequences do. If lengths are wrong,
// they may share elements of the arrays, but none ends behind them.
struct InverseOfHead {
  const int32_t* lists;  // the rows of the selection, which are dense
  int64_t list_rows, blocks;
  int64_t numbers;  // of these rows, those that count for nothing among them
  int64_t* starts;  // [blocks + 1]: where a block's rows begin; they end where the next one's do
  int64_t* places;  // [chunks][blocks]
  int32_t* rows;    // [numbers]: the rows of each block, ascending

  SELFATTN_HOST_DEVICE InverseOfHead(const InverseLists& all, const AttentionParams& p, int64_t batch,
                                     int64_t head) {
    const Selection& s = p.selection;
    const bool packed_queries = p.sequences.query_starts != nullptr;
    const bool packed_keys = p.sequences.key_starts != nullptr;
    const int64_t element = all.elements > 1 ? batch : 0;
    const int64_t list_head = all.heads > 1 ? head / s.heads_per_list : 0;
    const PackedRows queries = queries_of(p, element), keys = keys_of(p, element);
    lists = packed_queries ? s.row(0, head, queries.first) : s.row(element, head, 0);
    list_rows = packed_queries ? queries.count : s.rows;
    blocks = divide_up(keys.count, s.key_size);
    numbers = list_rows * s.longest;
    // A sequence has at most two starts more than whole blocks of keys.
    const int64_t first_start =
        list_head * all.starts_of_head +
        (packed_keys ? keys.first / s.key_size + 2 * element : element * (divide_up(p.keys, s.key_size) + 1));
    starts = all.starts + first_start;
    places = all.places + first_start * all.chunks;
    rows = all.rows + list_head * all.numbers_of_head +
           (packed_queries ? queries.first : element * s.rows) * s.longest;
  }
};

size_t inverse_lists_bytes(const AttentionParams& params);

// `memory` has inverse_lists_bytes() and is 256-byte aligned.
InverseLists inverse_lists_in(void* memory, const AttentionParams& params);

// Fills the arrays. Numbers of blocks that do not exist are left out.
void build_inverse_lists(const AttentionParams& params, const InverseLists& lists, const Launch& where);

}  // namespace selfattn::cuda::simt
