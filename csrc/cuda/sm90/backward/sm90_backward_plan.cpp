#include "plan.h"

namespace selfattn::cuda::sm90::backward {

bool takes(const AttentionParams& p, const BackwardArguments& a) {
  const bool options_fit = p.head_dim <= kMostDimWithOptions && p.value_dim <= kMostValueDimWithOptions;
  return (options_fit || sm80::backward::is_plain(p, a)) && p.queries > 0 &&
         is_mappable(a.grad_out, p.queries, p.value_dim);
}

Plan plan_side(const AttentionParams& p, const BackwardArguments& a,
               const sm80::backward::Statistics& statistics, int64_t rows, int64_t columns,
               bool owns_queries) {
  Plan plan;
  plan.plan = sm80::backward::plan_side(p, a, statistics, rows, owns_queries);
  if (plan.plan.blocks == 0) return plan;
  const int64_t queries = owns_queries ? rows : columns, keys = owns_queries ? columns : rows;
  MappedTensor& query = owns_queries ? plan.own_first : plan.passing_first;
  MappedTensor& grad_out = owns_queries ? plan.own_second : plan.passing_second;
  MappedTensor& key = owns_queries ? plan.passing_first : plan.own_first;
  MappedTensor& value = owns_queries ? plan.passing_second : plan.own_second;
  query = mapped_queries(p, p.query, p.head_dim, queries);
  grad_out = mapped_queries(p, a.grad_out, p.value_dim, queries);
  key = mapped_keys(p, p.key, p.head_dim, keys);
  value = mapped_keys(p, p.value, p.value_dim, keys);
  return plan;
}

}  // namespace selfattn::cuda::sm90::backward
