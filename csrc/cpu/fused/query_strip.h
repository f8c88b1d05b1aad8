// A strip: a few vectors of neighbouring queries of one (batch, head), one query per lane. Everything about a
// strip is kept transposed: a block of scores is S^T, keys down the rows and queries across the lanes.
// Maximum, sum and masks of a row of the softmax are then vertical vector operations, and keys and values are
// used as they lie in memory.
#pragma once

#include "../products/elementary.h"
#include "../products/few_query_rows.h"
#include "../products/operands.h"
#include "block_map.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Tells whether a strip's queries are multiplied by the scale; if not, the scores are. Pieces are multiplied
// by powers of two alone, which do not round them.
template <class P>
bool queries_take_scale(double scale) {
  if constexpr (kDirect<P>) {
    return scale_keeps_queries(scale);
  } else {
    return P::is_exact_factor(scale);
  }
}

// The most queries of a strip's tail, see query_tail.h: up to so many take less time than a vector of lanes.
// Vectors of eight gain nothing.
template <class P>
constexpr int64_t kMostTail = kDirect<P> && Simd<Scalar<P>>::kWidth >= 16 ? Simd<Scalar<P>>::kWidth / 4 : 0;

// Returns how many of a call's last queries are the tail of a strip. It depends on the number of queries and
// on options alone, because all passes must compute the same scores. Strips end with vectors, and so anywhere
// else, unless a function's map of blocks divides them.
template <class P>
int64_t tail_queries(const AttentionParams& p) {
  const int64_t rest = p.queries % Simd<Scalar<P>>::kWidth;
  return p.batch_invariant || p.function.any() || rest > kMostTail<P> ? 0 : rest;
}

// The queries first .. first + count - 1 of (batch, head).
template <class P>
struct QueryStrip {
  using T = Scalar<P>;

  int64_t batch, head, first, count;
  int64_t lanes;         // queries without those of the tail
  int64_t vecs;          // vectors in use
  KeyRange keys;         // all keys that some query of the strip may see by position and map
  bool few_queries;      // so few that lanes run over the head dim, see products/few_query_rows.h
  LaneOperand<P> query;  // scale * Q, the tail too; for few queries [count][padded head_dim]
  T* tail;               // [kMostTail][padded head_dim] scale * Q of the tail
  T* tail_product;       // [kMostTail][padded head_dim or value_dim] for multiply_strip_columns
  T rest_of_scale;       // the part of the scale that is not in query

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    query.allocate(p, p.head_dim, arena);
    tail = arena.take<T>(kMostTail<P> * round_up_to_vector<T>(p.head_dim));
    tail_product = arena.take<T>(kMostTail<P> * round_up_to_vector<T>(larger(p.head_dim, p.value_dim)));
  }

  SELFATTN_OUT_OF_LINE void begin(const AttentionParams& p, int64_t batch_index, int64_t head_index,
                                  int64_t first_query, int64_t queries) {
    batch = batch_index;
    head = head_index;
    first = first_query;
    count = queries;
    vecs = divide_up(queries, Simd<T>::kWidth);
    keys = shown_keys(p, batch, head, first, first + count - 1);
    few_queries = kDirect<P> && p.queries <= most_few_queries(p) && !p.batch_invariant;
    lanes = few_queries || first + count < p.queries ? count : count - tail_queries<P>(p);
    const RowSource rows = source(p, p.query, p.head_dim);
    const T in_query = take_scale(p);
    if constexpr (kDirect<P>) {
      if (few_queries) {
        load_rows<T>(query.data, rows.data, rows.dtype, rows.stride, count, p.head_dim, in_query);
        return;
      }
    }
    query.load(rows, in_query);
    if constexpr (kMostTail<P> > 0) load_tail(rows, in_query, tail);
  }

  // Does the same for any rows, without a place in the call. With `as_tail`, few rows are all in the tail.
  SELFATTN_OUT_OF_LINE void begin(const AttentionParams& p, const RowSource& rows, bool as_tail) {
    count = rows.rows;
    vecs = divide_up(count, Simd<T>::kWidth);
    few_queries = false;
    lanes = as_tail && count <= kMostTail<P> ? 0 : count;
    const T in_query = take_scale(p);
    if constexpr (kMostTail<P> > 0) {
      if (lanes == 0) return load_tail(rows, in_query, tail);
    }
    query.load(rows, in_query);
  }

  // Sets rest_of_scale, and returns the part of the scale that is in query.
  T take_scale(const AttentionParams& p) {
    rest_of_scale = T(1);
    T in_query = static_cast<T>(p.scale);
    if (!queries_take_scale<P>(p.scale)) std::swap(in_query, rest_of_scale);
    return in_query;
  }

  // Loads the tail's rows of a tensor, padded to whole vectors.
  void load_tail(const RowSource& rows, T factor, T* to) const {
    const RowSource s = rows.from(lanes, count - lanes);
    load_rows<T>(to, s.data, s.dtype, s.stride, s.rows, s.columns, factor);
  }

  // The strip's rows of a tensor shaped as query or out.
  RowSource source(const AttentionParams& p, const View& view, int64_t columns) const {
    return row_source(view, p.dtype, batch, head, first, count, columns);
  }
};

// Returns how many queries the strip that starts at `first` takes. It depends on the number of queries only.
template <class P>
int64_t strip_queries(int64_t first, int64_t queries) {
  using T = Scalar<P>;
  const int64_t rest = queries - first;
  const int64_t vecs = divide_up(rest, Simd<T>::kWidth);
  const int64_t take = next_tile_vecs<T>(vecs) * Simd<T>::kWidth;
  return smaller(take, rest);
}

// Calls body with the vectors to compute the next lanes of a strip with, of which `queries` are in use.
template <class P, class Body>
SELFATTN_INLINE void with_vectors_of(int64_t queries, const Body& body) {
  using S = Simd<Scalar<P>>;
  if constexpr (S::kHalves && kDirect<P>) {
    if (queries <= S::kWidth / 2) return body(LowerHalf<Scalar<P>>{});
  }
  body(S{});
}

}  // namespace selfattn::cpu::SELFATTN_ISA
