#include "backward_plan.h"

#include "../../rows/rows.h"
#include "../forward_plan.h"

namespace selfattn::cuda::mma::backward {

namespace {

// How many rows have statistics.
int64_t rows_of(const AttentionParams& p) {
  const bool packed = p.sequences.query_starts != nullptr;
  return (packed ? 1 : p.batch) * p.heads * padded_queries(p);
}

bool writable_by_pairs(const View& view, int64_t columns) {
  return columns % 2 == 0 && rows_start_at_multiples(view, 2 * size_of(view.dtype));
}

}  // namespace

bool is_bare(const AttentionParams& p, const BackwardArguments& a) {
  return mma::is_bare(p) && a.grad_weights.data == nullptr && a.grad_slopes_rows == nullptr &&
         readable_by_vectors(a.grad_out, p.value_dim);
}

size_t statistics_bytes(const AttentionParams& p) {
  return rows::row_gradients_bytes(p) + static_cast<size_t>(4 * rows_of(p)) * sizeof(float);
}

Statistics statistics_in(void* workspace, const AttentionParams& p) {
  Statistics statistics;
  statistics.queries = padded_queries(p);
  const int64_t count = rows_of(p);
  statistics.shift = reinterpret_cast<float*>(static_cast<char*>(workspace) + rows::row_gradients_bytes(p));
  statistics.inverse_sum = statistics.shift + count;
  statistics.delta = statistics.inverse_sum + count;
  statistics.large_shift = statistics.delta + count;
  return statistics;
}

Plan plan_side(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
               int64_t rows, bool owns_queries) {
  Plan plan;
  plan_call(p, plan);
  plan.arguments = a;
  plan.statistics = statistics;
  plan.units = p.batch * (owns_queries ? p.heads : p.kv_heads);
  plan.row_tiles = divide_up(owns_queries ? p.queries : p.keys, rows);
  plan.blocks = plan.units * plan.row_tiles;
  plan.grad_out_vectors = readable_by_vectors(a.grad_out, p.value_dim);
  plan.grad_query_vectors = readable_by_vectors(a.grad_query, p.head_dim);
  plan.grad_key_vectors = readable_by_vectors(a.grad_key, p.head_dim);
  plan.grad_value_vectors = readable_by_vectors(a.grad_value, p.value_dim);
  plan.grad_query_pairs = writable_by_pairs(a.grad_query, p.head_dim);
  plan.grad_key_pairs = writable_by_pairs(a.grad_key, p.head_dim);
  plan.grad_value_pairs = writable_by_pairs(a.grad_value, p.value_dim);
  return plan;
}

}  // namespace selfattn::cuda::mma::backward
