// The products that decoding needs, for an arithmetic P that computes in P itself. Those of pairs are in
// pairs/decode_by_vectors.h and pairs/decode_by_tiles.h.
#pragma once

#include "few_query_scores.h"
#include "few_query_values.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
struct FewQueryProducts {
  using Query = P;
  struct Session {  // what a thread holds while it multiplies
    void take_rows(int64_t) {}
  };

  static constexpr int64_t kStepKeys = 2;   // every call but the last takes a multiple of so many keys
  static constexpr int64_t kSpareRows = 0;  // rows of scores that are read but do not count

  // Rows of sums that the rows of a kv head take.
  static int64_t sums_rows(int64_t rows) { return rows; }
  // Elements that the queries of a kv head take.
  static int64_t queries_size(const AttentionParams& p, int64_t rows) {
    return rows * round_up_to_vector<P>(p.head_dim);
  }
  // Loads scale * Q.
  static void load_queries(const AttentionParams& p, const FewQueries& some, Query* to) {
    for (int64_t head = some.head; head < some.head + some.heads; ++head) {
      load_rows<P>(to, element(p.query.data, p.dtype, p.query.offset(some.batch, head, some.query)), p.dtype,
                   p.query.stride[2], some.queries, p.head_dim, static_cast<P>(p.scale));
      to += queries_size(p, some.queries);
    }
  }
  template <bool kListed = false>
  static void scores(const AttentionParams& p, const Query* query, int64_t rows, const FewQueryRows& keys,
                     P* s, int64_t ld) {
    few_query_scores<P, kListed>(query, rows, keys, p.head_dim, s, ld, 1);
  }
  static P round_weights(int64_t, P*) { return P(1); }
  using Values = FewQueryValues<P>;
  static Values weigh(const P* weights, const P* visible, int64_t ld, int64_t value_dim, P* sums,
                      int64_t ld_sums) {
    return {weights, visible, ld, value_dim, sums, ld_sums};
  }
  template <bool kListed = false>
  static void values(const Values& a, int64_t rows, const FewQueryRows& values) {
    few_query_values<P, kListed>(a, rows, values);
  }
  // Loads a vector of a row's sums, from a column on.
  static SELFATTN_INLINE typename Simd<P>::Vec load_sums(const P* sums, int64_t column) {
    return Simd<P>::load(sums + column);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
