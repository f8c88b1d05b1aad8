// attention_backward: the gradients of attention_forward and of attention_weights in one call; and
// attention_captured_gradients, those of the tensors that the function of a call reads.
#include "attention_backward.h"

#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

namespace {

Output head_gradient(const char* name, const TensorHandle& coefficients, const Output& rows,
                     const AttentionParams& p) {
  if (!coefficients) return {};
  const DType dtype = accumulation_dtype(p.dtype);
  const Input input = inspect(name, coefficients);
  Output sums = allocate(name, {input.size[0], input.size[1]}, dtype, input.device);
  if (rows.bytes == 0) {
    sums.fill_zero();
  } else {
    engine_of(input.device).sum_of_rows(p, rows.data, sums.data, input.size[0] == 1, input.device);
  }
  return sums;
}

// Allocates the gradient in the mask's own shape. The view has stride 0 along dimensions that the kernel sums
// over.
Output mask_gradient(const TensorHandle& mask_handle, bool needed, const AttentionParams& p, View* view) {
  if (!needed) return {};
  if (!mask_handle) refuse("need_mask_grad was given without attn_mask");
  if (p.mask.dtype == DType::kBool) refuse("a boolean attn_mask has no gradient");
  const Input mask = inspect("attn_mask", mask_handle);
  if (p.sequences.own_masks != nullptr) {
    Output grad_masks = allocate("grad_mask", {mask.size[0]}, p.mask.dtype, mask.device);
    *view = View{grad_masks.data, p.mask.dtype, {1, 0, 0, 0}};
    grad_masks.fill_zero();
    return grad_masks;
  }
  Output grad_mask = allocate("grad_mask", {mask.size[0], mask.size[1], mask.size[2], mask.size[3]},
                              p.mask.dtype, mask.device);
  *view = grad_mask.view(p.mask.dtype);
  for (int d = 0; d < kMaxRank; ++d) {
    if (mask.size[d] == 1) view->stride[d] = 0;
  }
  // Kernels add to it, or skip tiles in which all scores are hidden.
  grad_mask.fill_zero();
  return grad_mask;
}

}  // namespace

void BackwardTensors::take_optional(Stack& stack) {
  for (TensorHandle* tensor : {&out_residual, &grad_row, &grad_weights, &grad_mean, &grad_sink, &grad_keys}) {
    *tensor = stack.optional_tensor();
  }
}

BackwardCall::BackwardCall(BackwardTensors& t, double scale, const Options& options)
    : query(seen(inspect("query", t.query), options, forms[0])),
      key(seen(inspect("key", t.key, query), options, forms[1])),
      value(seen(inspect("value", t.value, query), options, forms[2])),
      params(attention_params(query, key, &value, scale, options)) {
  const AttentionParams& p = params;
  BackwardArguments& a = arguments;
  if (options.block_table) refuse("keys in pages (block_table) have no gradient");
  const auto output_like = [&](const char* name, TensorHandle& handle) {
    HeadsFirst form;
    Input input = inspect(name, handle, query), four = seen(input, options, form);
    check_shape(four, {query_batch(p), p.heads, query_rows(p), p.value_dim});
    check_dtype(four, p.dtype);
    if (has_unit_last_stride(four)) return plain_view(four, p.dtype);
    make_contiguous(handle, input);
    return plain_view(seen(input, options, form), p.dtype);
  };
  const auto row_statistic = [&](const char* name, TensorHandle& handle) {
    Input input = inspect(name, handle, query);
    return row_statistics(handle, input, p);
  };
  a.grad_out = output_like("grad_out", t.grad_out);
  a.out = output_like("out", t.out);
  if (t.out_residual) a.out_residual = output_like("out_residual", t.out_residual);
  if (t.statistics) {
    Input both = inspect("statistics", t.statistics, query);
    const auto rows = pair_of_row_statistics(t.statistics, both, p);
    a.row_max = rows.first;
    a.row_sum = rows.second;
  } else {
    a.row_max = row_statistic("row_max", t.row_max);
    a.row_sum = row_statistic("row_sum", t.row_sum);
  }
  if (t.grad_row) a.grad_row = row_statistic("grad_row", t.grad_row);
  if (t.grad_mean) a.grad_mean = row_statistic("grad_mean", t.grad_mean);
  if (t.grad_sink) a.grad_sink = row_statistic("grad_sink", t.grad_sink);
  if (t.grad_keys) {
    Input grad_keys = inspect("grad_keys", t.grad_keys, query);
    a.grad_keys = numbers_per_key(t.grad_keys, grad_keys, p);
  }
  if (t.grad_weights) {
    const Input grad_weights = inspect("grad_weights", t.grad_weights, query);
    check_shape(grad_weights, {p.batch, p.heads, p.queries, p.keys});
    check_dtype(grad_weights, p.dtype);
    a.grad_weights = plain_view(grad_weights, p.dtype);
  }
}

void Gradients::allocate_missing() {
  const DType accumulation = accumulation_dtype(dtype);
  if (!mask.handle) mask = allocate_nothing(dtype, device);
  if (!slopes.handle) slopes = allocate_nothing(accumulation, device);
  if (!sinks.handle) sinks = allocate_nothing(accumulation, device);
}

GradientResults::GradientResults(const BackwardCall& call, bool need_mask_grad, const Options& options,
                                 BackwardArguments& a)
    : call_(call), options_(options) {
  const AttentionParams& p = call.params;
  const Input &query = call.query, &key = call.key, &value = call.value;
  grads_.dtype = p.dtype;
  grads_.device = query.device;
  grads_.mask = mask_gradient(options.attn_mask, need_mask_grad, p, &a.grad_mask);
  const auto gradient_of = [&](const char* name, const Input& input) {
    return allocate_like(name, {input.size[0], input.size[1], input.size[2], input.size[3]}, p.dtype, input,
                         static_cast<bool>(options.offsets));
  };
  grads_.query = gradient_of("grad_query", query);
  grads_.key = gradient_of("grad_key", key);
  grads_.value = gradient_of("grad_value", value);
  const auto rows_of = [&](const char* name) {
    return allocate(name, {query_batch(p), p.heads, query_rows(p)}, accumulation_dtype(p.dtype),
                    query.device);
  };
  if (options.alibi_slopes) {
    slopes_rows_ = rows_of("the slopes' row gradients");
  }
  if (options.sinks) {
    sinks_rows_ = rows_of("the sinks' row gradients");
  }

  const bool nothing = p.batch == 0 || p.heads == 0 || p.queries == 0;
  // Kernels skip sequences without queries, and keys that are in no sequence.
  if (nothing || options.has_lengths()) {
    grads_.key.fill_zero();
    grads_.value.fill_zero();
  }
  if (leaves_rows_out(p, query.device)) grads_.query.fill_zero();
  if (!nothing) {
    a.grad_query = grads_.query.view(p.dtype);
    a.grad_key = grads_.key.view(p.dtype);
    a.grad_value = grads_.value.view(p.dtype);
    a.grad_slopes_rows = slopes_rows_.data;
    a.grad_sinks_rows = sinks_rows_.data;
  }
}

Gradients GradientResults::finish() {
  grads_.slopes = head_gradient("grad_slopes", options_.alibi_slopes, slopes_rows_, call_.params);
  grads_.sinks = head_gradient("grad_sinks", options_.sinks, sinks_rows_, call_.params);
  return std::move(grads_);
}

Gradients run_backward(BackwardTensors& t, double scale, bool need_mask_grad, const Options& options) {
  const BackwardCall call(t, scale, options);
  BackwardArguments arguments = call.arguments;
  GradientResults results(call, need_mask_grad, options, arguments);
  engine_of(call.query.device).backward(options.kernel_name.text, call.params, arguments, call.query.device);
  return results.finish();
}

void attention_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  BackwardTensors tensors(stack);
  tensors.row_max = stack.tensor();
  tensors.row_sum = stack.tensor();
  const double scale = stack.number();
  tensors.take_optional(stack);
  const bool need_mask_grad = stack.flag();
  const Options options(stack);

  Gradients grads = run_backward(tensors, scale, need_mask_grad, options);
  grads.allocate_missing();
  stack.put(grads.query.handle, grads.key.handle, grads.value.handle, grads.mask.handle, grads.slopes.handle,
            grads.sinks.handle);
}

namespace {

// How many elements the tensor has; -1 if their number overflows.
int64_t count_of(const Input& input) {
  int64_t count = 1;
  for (int64_t d = 0; d < input.rank; ++d) {
    if (input.size[d] == 0) return 0;
  }
  for (int64_t d = 0; d < input.rank; ++d) {
    if (__builtin_mul_overflow(count, input.size[d], &count)) return -1;
  }
  return count;
}

int64_t checked_sum(const std::vector<int64_t>& sizes, const Options& options) {
  if (sizes.size() != options.captured.size()) {
    refuse("captured_sizes must be ", options.captured.size(), " numbers, one for each captured tensor, but ",
           "they are ", sizes.size());
  }
  int64_t sum = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t count = count_of(inspect("captured", options.captured[i]));
    if (sizes[i] != 0 && sizes[i] != count) {
      refuse("captured_sizes must be 0 or how many elements the tensor has, but for tensor ", i, " with ",
             count, " elements it is ", sizes[i]);
    }
    if (__builtin_add_overflow(sum, sizes[i], &sum)) {
      refuse("the captured tensors have more elements than memory can address");
    }
  }
  return sum;
}

}  // namespace

void attention_captured_gradients(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  BackwardTensors tensors(stack);
  tensors.row_max = stack.tensor();
  tensors.row_sum = stack.tensor();
  const double scale = stack.number();
  const std::vector<int64_t> sizes = stack.integers();
  const int64_t exclusive = stack.integer();
  tensors.take_optional(stack);
  const Options options(stack);

  const BackwardCall call(tensors, scale, options);
  const int64_t sum = checked_sum(sizes, options);
  const ScoreFunctionTable* table = call.params.function.table;
  // A function for a GPU needs no such check: its kernel then adds nothing.
  if (sum > 0 && table->device == nullptr && table->add_captured == nullptr) {
    refuse("score_function \"", options.score_function->text, "\" has no gradient of captured tensors");
  }
  if (exclusive < 0 || exclusive > 7) refuse("exclusive must lie between 0 and 7, but it is ", exclusive);
  Output sums = allocate("the captured tensors' gradients", {sum}, DType::kFloat64, call.query.device);
  sums.fill_zero();
  CapturedGradients gradients;
  gradients.sizes = sizes.data();
  gradients.count = static_cast<int64_t>(sizes.size());
  gradients.sums = static_cast<double*>(sums.data);
  gradients.exclusive_batch = (exclusive & 1) != 0;
  gradients.exclusive_head = (exclusive & 2) != 0;
  gradients.exclusive_query = (exclusive & 4) != 0;
  if (sum > 0) {
    engine_of(call.query.device)
        .captured_gradients(options.kernel_name.text, call.params, call.arguments, gradients,
                            call.query.device);
  }
  stack.put(sums.handle);
}

}  // namespace selfattn::ops
