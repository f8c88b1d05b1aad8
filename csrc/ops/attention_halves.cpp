// attention_scores and masked_softmax, the two halves of attention, with their backwards; and
// attention_weights, which computes both from the row statistics of attention_forward.
#include "attention_arguments.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

// attention_scores: scale * query @ key^T, each query head with its key head; and its backward.

namespace {

ScoresParams scores_params(const Input& query, const Input& key, double scale) {
  check_query_and_key(query, key);
  ScoresParams p;
  add_query_and_key(p, query, key);
  p.scale = finite_scale(scale, p.dtype);
  return p;
}

}  // namespace

void attention_scores(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query_handle = stack.tensor();
  const TensorHandle key_handle = stack.tensor();
  const double scale = stack.number();
  const Name name = stack.name();

  const Input query = inspect("query", query_handle);
  const Input key = inspect("key", key_handle, query);
  ScoresParams p = scores_params(query, key, scale);
  Output scores = allocate("scores", {p.batch, p.heads, p.queries, p.keys}, p.dtype, query.device);
  p.scores = scores.view(p.dtype);
  engine_of(query.device).scores(name.text, p, query.device);
  stack.put(scores.handle);
}

void attention_scores_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  TensorHandle grad_scores_handle = stack.tensor();
  const TensorHandle query_handle = stack.tensor();
  const TensorHandle key_handle = stack.tensor();
  const double scale = stack.number();
  const Name name = stack.name();

  const Input query = inspect("query", query_handle);
  const Input key = inspect("key", key_handle, query);
  ScoresParams p = scores_params(query, key, scale);
  Input grad_scores = inspect("grad_scores", grad_scores_handle, query);
  check_shape(grad_scores, {p.batch, p.heads, p.queries, p.keys});
  check_dtype(grad_scores, p.dtype);
  if (!has_unit_last_stride(grad_scores)) make_contiguous(grad_scores_handle, grad_scores);
  p.scores = plain_view(grad_scores, p.dtype);

  Output grad_query = allocate_like("grad_query", {p.batch, p.heads, p.queries, p.head_dim}, p.dtype, query);
  Output grad_key = allocate_like("grad_key", {p.batch, p.kv_heads, p.keys, p.head_dim}, p.dtype, key);
  p.grad_query = grad_query.view(p.dtype);
  p.grad_key = grad_key.view(p.dtype);
  if (p.batch == 0 || p.heads == 0 || p.queries == 0 || p.keys == 0) {
    grad_query.fill_zero();
    grad_key.fill_zero();
  }
  engine_of(query.device).scores_backward(name.text, p, query.device);
  stack.put(grad_query.handle, grad_key.handle);
}

// masked_softmax: softmax(scale * scores + mask) over the keys that a query sees; and its backward.

namespace {

SoftmaxParams softmax_params(const Input& scores, double scale) {
  check_rank(scores, 4);
  SoftmaxParams p;
  p.dtype = float_dtype(scores);
  p.batch = scores.size[0];
  p.heads = scores.size[1];
  p.queries = scores.size[2];
  p.keys = scores.size[3];
  p.scale = finite_scale(scale, p.dtype);
  p.scores = plain_view(scores, p.dtype);
  return p;
}

}  // namespace

void masked_softmax(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  TensorHandle scores_handle = stack.tensor();
  const double scale = stack.number();
  const TensorHandle mask_handle = stack.optional_tensor();
  const bool is_causal = stack.flag();
  const int64_t query_offset = stack.integer();
  const Name name = stack.name();

  Input scores = inspect("scores", scores_handle);
  check_rank(scores, 4);
  if (!has_unit_last_stride(scores)) make_contiguous(scores_handle, scores);
  SoftmaxParams p = softmax_params(scores, scale);
  if (mask_handle) {
    p.mask = mask_view(inspect("mask", mask_handle, scores), p.batch, p.heads, p.queries, p.keys);
  }
  p.window_right = is_causal ? 0 : -1;
  p.query_offset = checked_query_offset(query_offset);

  Output weights = allocate("weights", {p.batch, p.heads, p.queries, p.keys}, p.dtype, scores.device);
  p.result = weights.view(p.dtype);
  engine_of(scores.device).masked_softmax(name.text, p, scores.device);
  stack.put(weights.handle);
}

void masked_softmax_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  TensorHandle grad_weights_handle = stack.tensor();
  TensorHandle weights_handle = stack.tensor();
  const double scale = stack.number();
  const Name name = stack.name();

  Input weights = inspect("weights", weights_handle);
  check_rank(weights, 4);
  if (!has_unit_last_stride(weights)) make_contiguous(weights_handle, weights);
  SoftmaxParams p = softmax_params(weights, scale);
  Input grad_weights = inspect("grad_weights", grad_weights_handle, weights);
  check_shape(grad_weights, {p.batch, p.heads, p.queries, p.keys});
  check_dtype(grad_weights, p.dtype);
  if (!has_unit_last_stride(grad_weights)) make_contiguous(grad_weights_handle, grad_weights);
  p.grad = plain_view(grad_weights, p.dtype);

  Output grad_scores =
      allocate("grad_scores", {p.batch, p.heads, p.queries, p.keys}, p.dtype, weights.device);
  p.result = grad_scores.view(p.dtype);
  engine_of(weights.device).masked_softmax_backward(name.text, p, weights.device);
  stack.put(grad_scores.handle);
}

// attention_weights: softmax(scores), after dropout.
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
