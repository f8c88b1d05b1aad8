// attention_weight_sums: what each key received from all queries, or each query's weights times numbers per
// key, from the row statistics of a forward.
#include "attention_arguments.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

void attention_weight_sums(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query_handle = stack.tensor();
  const TensorHandle key_handle = stack.tensor();
  TensorHandle row_max_handle = stack.tensor();
  TensorHandle row_sum_handle = stack.tensor();
  const double scale = stack.number();
  TensorHandle per_key_handle = stack.optional_tensor();
  const Options options(stack);

  const Input query = inspect("query", query_handle);
  const Input key = inspect("key", key_handle, query);
  Input row_max = inspect("row_max", row_max_handle, query);
  Input row_sum = inspect("row_sum", row_sum_handle, query);
  const AttentionParams p = attention_params(query, key, nullptr, scale, options);
  WeightSums sums;
  sums.row_max = row_statistics(row_max_handle, row_max, p);
  sums.row_sum = row_statistics(row_sum_handle, row_sum, p);
  const DType dtype = accumulation_dtype(p.dtype);
  Output result;
  if (per_key_handle) {
    Input per_key = inspect("per_key", per_key_handle, query);
    sums.per_key = numbers_per_key(per_key_handle, per_key, p);
    result = allocate("sums of queries", {query_batch(p), p.heads, query_rows(p)}, dtype, query.device);
    sums.of_queries = result.data;
  } else {
    result = allocate("sums of keys", {key_batch(p), p.heads, p.keys_per_head}, dtype, query.device);
    sums.of_keys = result.data;
  }
  // Kernels skip rows of no sequence, and there is nothing to sum up without queries or keys.
  if (options.has_lengths() || p.queries == 0 || p.keys == 0) result.fill_zero();
  engine_of(query.device).weight_sums(options.kernel_name.text, p, sums, query.device);
  stack.put(result.handle);
}

}  // namespace selfattn::ops
