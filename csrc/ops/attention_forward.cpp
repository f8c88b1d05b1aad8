// attention_forward: out = softmax(scores) @ value, and the row statistics that the backward needs.
#include "attention_forward.h"

#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

ForwardCall::ForwardCall(const TensorHandle& query_handle, const TensorHandle& key_handle,
                         const TensorHandle& value_handle, double scale, const Options& options)
    : rows_first(options.offsets),
      query(seen(inspect("query", query_handle), options, forms[0])),
      key(seen(inspect("key", key_handle, query), options, forms[1])),
      value(seen(inspect("value", value_handle, query), options, forms[2])),
      params(attention_params(query, key, &value, scale, options)) {}

Output ForwardCall::allocate_out(const char* name) const {
  const AttentionParams& p = params;
  Output out =
      allocate_like(name, {query_batch(p), p.heads, query_rows(p), p.value_dim}, p.dtype, query, rows_first);
  if (leaves_rows_out(p, query.device)) out.fill_zero();
  return out;
}

Output ForwardCall::allocate_statistic(const char* name) const {
  const AttentionParams& p = params;
  Output rows =
      allocate(name, {query_batch(p), p.heads, query_rows(p)}, accumulation_dtype(p.dtype), query.device);
  // A sum of 0 says that a row sees nothing.
  if (leaves_rows_out(p, query.device)) rows.fill_zero();
  return rows;
}

void ForwardCall::require_weights() const {
  const AttentionParams& p = params;
  // For small weights the check is skipped, because it would take as long as their forward.
  constexpr int64_t kFew = int64_t{1} << 18;
  if (p.keys == 0 || p.batch * p.heads * p.queries <= kFew / p.keys) return;
  allocate_weights(p, query.device);
}

void run_forward(const ForwardCall& call, const Name& kernel, const Output& out, void* row_max, void* row_sum,
                 void* residual) {
  const Device device = call.query.device;
  engine_of(device).forward(kernel.text, call.params,
                            ForwardOutputs{out.view(call.params.dtype), row_max, row_sum, residual}, device);
}

void attention_forward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query = stack.tensor();
  const TensorHandle key = stack.tensor();
  const TensorHandle value = stack.tensor();
  const double scale = stack.number();
  const bool need_residual = stack.flag();
  const bool need_weights = stack.flag();
  const Options options(stack);

  const ForwardCall call(query, key, value, scale, options);
  const AttentionParams& p = call.params;
  Output out = call.allocate_out("out");
  Output row_max = call.allocate_statistic("row_max");
  Output row_sum = call.allocate_statistic("row_sum");
  if (need_weights) call.require_weights();
  const bool has_residual = need_residual && call.rounds();
  Output residual =
      has_residual ? call.allocate_out("out_residual") : allocate_nothing(p.dtype, call.query.device);
  run_forward(call, options.kernel_name, out, row_max.data, row_sum.data,
              has_residual ? residual.data : nullptr);
  stack.put(out.handle, row_max.handle, row_sum.handle, residual.handle);
}

void attention_refusals(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query = stack.tensor();
  const TensorHandle key = stack.tensor();
  const TensorHandle value = stack.tensor();
  const double scale = stack.number();
  const Options options(stack);

  const ForwardCall call(query, key, value, scale, options);
  const Device device = call.query.device;
  stack.put_text(engine_of(device).refusals(options.kernel_name.text, call.params, device));
}

}  // namespace selfattn::ops
