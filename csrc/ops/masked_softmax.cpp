// masked_softmax: softmax(scale * scores + mask) over the keys that a query sees; and its backward.
#include "attention_arguments.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

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

}  // namespace selfattn::ops
