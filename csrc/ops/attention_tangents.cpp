// attention_jvp, the forward mode of attention_forward, and attention_backward_backward, second derivatives;
// see Note [Second derivatives] in core/tangents.h.
#include "tangent_arguments.h"

#include "attention_backward.h"
#include "attention_forward.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

namespace {

View view_like(const char* name, TensorHandle& handle, const Input& like, DType dtype, const Input& query) {
  if (!handle) return {};
  Input input = inspect(name, handle, query);
  check_shape(input, {like.size[0], like.size[1], like.size[2], like.size[3]});
  check_dtype(input, dtype);
  if (!has_unit_last_stride(input)) make_contiguous(handle, input);
  return plain_view(input, dtype);
}

// The mask's tangent has the mask's shape; dimensions of size 1 are broadcast in both.
View mask_tangent(TensorHandle& handle, const AttentionParams& p, const Input& query,
                  const Options& options) {
  if (!handle) return {};
  if (!options.attn_mask) refuse("tangent_mask was given without attn_mask");
  if (p.mask.dtype == DType::kBool) refuse("a boolean attn_mask has no tangent");
  const Input mask = inspect("attn_mask", options.attn_mask, query);
  Input input = inspect("tangent_mask", handle, query);
  check_dtype(input, p.mask.dtype);
  if (options.mask_shapes) {
    check_shape(input, {mask.size[0]});
    if (!is_contiguous(input)) make_contiguous(handle, input);
    return View{const_cast<void*>(input.data), p.mask.dtype, {1, 0, 0, 0}};
  }
  check_shape(input, {mask.size[0], mask.size[1], mask.size[2], mask.size[3]});
  return mask_view(input, p.batch, p.heads, p.queries, p.keys);
}

HeadScalars scalar_tangents(const char* name, const TensorHandle& handle, const char* primal_name,
                            const TensorHandle& primal, const AttentionParams& p, const Input& query) {
  if (!handle) return {};
  if (!primal) refuse(name, " was given without ", primal_name);
  const Input like = inspect(primal_name, primal, query);
  const Input input = inspect(name, handle, query);
  check_shape(input, {like.size[0], like.size[1]});
  return head_scalars(name, handle, p, query);
}

}  // namespace

Tangents checked_tangents(TangentTensors& t, const AttentionParams& p, const Input& query, const Input& key,
                          const Input& value, const Options& options) {
  Tangents tangents;
  tangents.query = view_like("tangent_query", t.query, query, p.dtype, query);
  tangents.key = view_like("tangent_key", t.key, key, p.dtype, query);
  tangents.value = view_like("tangent_value", t.value, value, p.dtype, query);
  tangents.mask = mask_tangent(t.mask, p, query, options);
  tangents.alibi_slopes =
      scalar_tangents("tangent_slopes", t.slopes, "alibi_slopes", options.alibi_slopes, p, query);
  tangents.sinks = scalar_tangents("tangent_sinks", t.sinks, "sinks", options.sinks, p, query);
  return tangents;
}

ResultTangents allocate_tangents(const AttentionParams& p, const Input& query) {
  ResultTangents result;
  result.out =
      allocate_like("tangent_out", {query_batch(p), p.heads, query_rows(p), p.value_dim}, p.dtype, query);
  result.lse = allocate("tangent_lse", {query_batch(p), p.heads, query_rows(p)}, accumulation_dtype(p.dtype),
                        query.device);
  if (leaves_rows_out(p, query.device)) {
    result.out.fill_zero();
    result.lse.fill_zero();
  }
  return result;
}

void attention_jvp(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query = stack.tensor();
  const TensorHandle key = stack.tensor();
  const TensorHandle value = stack.tensor();
  const double scale = stack.number();
  TangentTensors tangents(stack);
  const bool need_residual = stack.flag();
  const Options options(stack);

  const ForwardCall call(query, key, value, scale, options);
  const AttentionParams& p = call.params;
  JvpArguments arguments;
  arguments.tangents = checked_tangents(tangents, p, call.query, call.key, call.value, options);
  Output out = call.allocate_out("out");
  Output row_max = call.allocate_statistic("row_max");
  Output row_sum = call.allocate_statistic("row_sum");
  const bool has_residual = need_residual && call.rounds();
  Output residual =
      has_residual ? call.allocate_out("out_residual") : allocate_nothing(p.dtype, call.query.device);
  ResultTangents results = allocate_tangents(p, call.query);
  arguments.forward = {out.view(p.dtype), row_max.data, row_sum.data, has_residual ? residual.data : nullptr};
  arguments.tangent_out = results.out.view(p.dtype);
  arguments.tangent_lse = results.lse.data;
  engine_of(call.query.device).jvp(options.kernel_name.text, p, arguments, call.query.device);
  stack.put(out.handle, row_max.handle, row_sum.handle, residual.handle, results.out.handle,
            results.lse.handle);
}

void attention_backward_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  BackwardTensors tensors(stack);
  tensors.row_max = stack.tensor();
  tensors.row_sum = stack.tensor();
  const double scale = stack.number();
  TangentTensors tangents(stack);
  tensors.out_residual = stack.optional_tensor();
  tensors.grad_row = stack.optional_tensor();
  const bool need_mask_grad = stack.flag();
  const Options options(stack);

  const BackwardCall call(tensors, scale, options);
  const AttentionParams& p = call.params;
  const Device device = call.query.device;
  BackwardBackwardArguments arguments;
  arguments.tangents = checked_tangents(tangents, p, call.query, call.key, call.value, options);
  arguments.backward = call.arguments;
  ResultTangents results = allocate_tangents(p, call.query);
  arguments.tangent_out = results.out.view(p.dtype);
  arguments.tangent_lse = results.lse.data;

  GradientResults gradients(call, need_mask_grad, options, arguments.backward);
  engine_of(device).backward_backward(options.kernel_name.text, p, arguments, device);
  Gradients grads = gradients.finish();
  grads.allocate_missing();
  stack.put(grads.query.handle, grads.key.handle, grads.value.handle, grads.mask.handle, grads.slopes.handle,
            grads.sinks.handle, results.out.handle, results.lse.handle);
}

}  // namespace selfattn::ops
