#include "sm90_backward_plan.h"

namespace selfattn::cuda::sm90::backward {

Plan plan_side(const AttentionParams& p, const BackwardArguments& a,
               const mma::backward::Statistics& statistics, int64_t rows, int64_t columns,
               bool owns_queries) {
  Plan plan{{}, mma::backward::plan_side(p, a, statistics, rows, owns_queries)};
  if (plan.blocks == 0) return plan;
  const int64_t queries = owns_queries ? rows : columns, keys = owns_queries ? columns : rows;
  MappedTensor& query = owns_queries ? plan.own_qk : plan.passing_qk;
  MappedTensor& grad_out = owns_queries ? plan.own_vo : plan.passing_vo;
  MappedTensor& key = owns_queries ? plan.passing_qk : plan.own_qk;
  MappedTensor& value = owns_queries ? plan.passing_vo : plan.own_vo;
  query = mapped_queries(p, p.query, p.head_dim, queries);
  grad_out = mapped_queries(p, a.grad_out, p.value_dim, queries);
  key = mapped_keys(p, p.key, p.head_dim, keys);
  value = mapped_keys(p, p.value, p.value_dim, keys);
  return plan;
}

}  // namespace selfattn::cuda::sm90::backward
