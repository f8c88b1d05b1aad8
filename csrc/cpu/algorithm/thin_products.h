// What decoding needs of an arithmetic P, for those that compute in P itself; for Pairs see thin_pairs.h.
#pragma once

#include "thin_scores.h"
#include "thin_values.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
struct ThinProducts {
  using Query = P;

  static int64_t query_size(int64_t head_dim) { return round_up_to_vector<P>(head_dim); }
  // scale * Q of one head.
  static void load_queries(const AttentionParams& p, int64_t offset, Query* to) {
    load_rows<P>(to, element(p.query.data, p.dtype, offset), p.dtype, p.query.stride[2], p.queries,
                 p.head_dim, static_cast<P>(p.scale));
  }
  static void scores(const AttentionParams& p, const Query* query, int64_t rows, const ThinRows& keys, P* s,
                     int64_t ld) {
    thin_scores<P>(query, rows, keys, p.head_dim, s, ld, 1);
  }
  static P round_weights(int64_t, P*) { return P(1); }
  using Values = ThinValues<P>;
  static Values weigh(const P* weights, const P* visible, int64_t ld, int64_t value_dim, P* sums,
                      int64_t ld_sums) {
    return {weights, visible, ld, value_dim, sums, ld_sums};
  }
  static void values(const Values& a, int64_t rows, const ThinRows& values) {
    thin_values<P>(a, rows, values);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
