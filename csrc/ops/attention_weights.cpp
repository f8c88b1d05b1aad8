// attention_weights: softmax(scores), after dropout, from the row statistics of attention_forward.
#include "attention_arguments.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

void attention_weights(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query_handle = stack.tensor();
  const TensorHandle key_handle = stack.tensor();
  TensorHandle row_max_handle = stack.tensor();
  TensorHandle row_sum_handle = stack.tensor();
  const double scale = stack.number();
  const Options options(stack);

  const Input query = inspect("query", query_handle);
  const Input key = inspect("key", key_handle, query);
  Input row_max = inspect("row_max", row_max_handle, query);
  Input row_sum = inspect("row_sum", row_sum_handle, query);
  const AttentionParams p = attention_params(query, key, nullptr, scale, options);
  WeightsOutputs outputs;
  outputs.row_max = row_statistics(row_max_handle, row_max, p);
  outputs.row_sum = row_statistics(row_sum_handle, row_sum, p);

  Output weights = allocate_weights(p, query.device);
  if (options.has_lengths()) weights.fill_zero();
  outputs.weights = weights.view(p.dtype);
  engine_of(query.device).weights(options.kernel_name.text, p, outputs, query.device);
  stack.put(weights.handle);
}

}  // namespace selfattn::ops
