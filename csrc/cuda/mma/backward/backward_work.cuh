// The work of a block of the backward: its rows, and the columns that pass by.
#pragma once

#include "../../common/element.cuh"
#include "../../common/sequence.cuh"
#include "backward_kind.cuh"
#include "backward_plan.h"

namespace selfattn::cuda::mma::backward {

// A tile of columns that passes by. Sizes and indices have 32 bits here, as in the forward.
struct Passing {
  int head;   // that of the queries which the tile's scores belong to
  int first;  // key or query
};

// The rows that a block owns: a tile of a unit, which is a head's queries or a kv head's keys.
struct RowTile {
  int64_t unit;
  int first_row;

  // `block` counts row tiles first, so that blocks which run together share in the cache what passes by. The
  // tiles that see most under a causal mask start first: the last ones of queries, the first ones of keys.
  template <class C>
  static __device__ __forceinline__ RowTile of_block(const Plan& plan, int64_t block) {
    int tile = static_cast<int>(block % plan.row_tiles);
    if (C::kOwnsQueries) tile = static_cast<int>(plan.row_tiles) - 1 - tile;
    return {block / plan.row_tiles, tile * C::kRows};
  }
};

// Work lies in shared memory: numbers that are needed once per tile should not fill registers in between.
template <class C>
struct Work {
  RowTile tile;
  int64_t own_statistic;  // that of the tile's first row, where rows are queries
  int batch, kv_head;
  int head, last_head;         // those of the queries; the last is before the first if nothing is seen
  int first_row;               // the tile's first query or key
  int rows;                    // how many of the tile exist: none beyond a sequence's end
  int begin, end;              // the columns that some row may see by its position
  int queries, keys;           // how many exist
  int query_batch, key_batch;  // their place in tensors, see Sequence
  int first_query, first_key;
  int64_t query_offset;
  int seen_begin, seen_end;  // see SeenKeys
  int64_t first_statistic;   // the first head's, see Statistics
  const void* passing_qk;    // row 0 of the keys of kv_head or of the queries of `head`
  const void* passing_vo;    // the same of values or dO

  __device__ __forceinline__ Work(const Plan& plan, const RowTile& own) {
    const AttentionParams& p = plan.params;
    const int64_t unit = own.unit;
    tile = own;
    first_row = own.first_row;
    const int group = static_cast<int>(p.heads / p.kv_heads);
    if (C::kOwnsQueries) {
      batch = static_cast<int>(unit / p.heads);
      head = last_head = static_cast<int>(unit % p.heads);
      kv_head = head / group;
    } else {
      batch = static_cast<int>(unit / p.kv_heads);
      kv_head = static_cast<int>(unit % p.kv_heads);
      head = kv_head * group;
      last_head = head + group - 1;
    }

    const Sequence sequence = sequence_of(p, batch);
    queries = static_cast<int>(sequence.queries);
    keys = static_cast<int>(sequence.keys);
    query_batch = static_cast<int>(sequence.query_batch);
    key_batch = static_cast<int>(sequence.key_batch);
    first_query = static_cast<int>(sequence.first_query);
    first_key = static_cast<int>(sequence.first_key);
    query_offset = sequence.query_offset;
    first_statistic = plan.statistics.first(p, batch, first_query);
    own_statistic = first_statistic + head * plan.statistics.queries + first_row;

    const Positions positions = positions_of(p, sequence);
    rows = min((C::kOwnsQueries ? queries : keys) - first_row, C::kRows);
    if (C::kOwnsQueries) {
      const KeyRange range = visible_keys(positions, first_row, first_row + rows - 1);
      begin = static_cast<int>(range.begin);
      end = static_cast<int>(range.end);
    } else {
      const QueryRange range = visible_queries(positions, first_row, first_row + rows - 1);
      begin = static_cast<int>(range.begin);
      end = static_cast<int>(range.end);
    }
    passing_qk = rows_of<!C::kOwnsQueries>(C::kOwnsQueries ? p.key : p.query);
    passing_vo = rows_of<!C::kOwnsQueries>(C::kOwnsQueries ? p.value : plan.arguments.grad_out);
    if (begin >= end) last_head = head - 1;
    const SeenKeys seen = seen_keys(p, sequence);
    seen_begin = seen.begin;
    seen_end = seen.end;
  }

  // Tiles begin at multiples of their size, so that a row's bits depend on the row alone.
  __device__ __forceinline__ Passing first_passing() const {
    return {head, begin / C::kTileColumns * C::kTileColumns};
  }
  __device__ __forceinline__ Passing next(Passing passing) const {
    passing.first += C::kTileColumns;
    return passing.first < end ? passing
                               : Passing{passing.head + 1, begin / C::kTileColumns * C::kTileColumns};
  }
  __device__ __forceinline__ bool holds(Passing passing) const { return passing.head <= last_head; }

  // The query and the key of an element. They need not exist.
  __device__ __forceinline__ int query(Passing passing, int row, int column) const {
    return C::kOwnsQueries ? first_row + row : passing.first + column;
  }
  __device__ __forceinline__ int key(Passing passing, int row, int column) const {
    return C::kOwnsQueries ? passing.first + column : first_row + row;
  }
  // How many columns of a tile exist.
  __device__ __forceinline__ int count(Passing passing) const {
    return min((C::kOwnsQueries ? keys : queries) - passing.first, C::kTileColumns);
  }

  template <bool kOfQueries>
  __device__ __forceinline__ const void* rows_of(const View& view) const {
    return static_cast<const typename Element<C::kDType>::Storage*>(view.data) +
           (kOfQueries ? offset_of_query(view, head, 0) : offset_of_key(view, kv_head, 0));
  }

  // The places in tensors of a query of a head, and of a key of a kv head.
  __device__ __forceinline__ int64_t offset_of_query(const View& view, int of_head, int query) const {
    return view.offset(query_batch, of_head, first_query + query);
  }
  __device__ __forceinline__ int64_t offset_of_key(const View& view, int of_kv_head, int key) const {
    return view.offset(key_batch, of_kv_head, first_key + key);
  }
};

}  // namespace selfattn::cuda::mma::backward
