// attention_scores: scale * query @ key^T, each query head with its key head; and its backward.
#include "attention_arguments.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

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

}  // namespace selfattn::ops
