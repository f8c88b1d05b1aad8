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

void run_forward(const ForwardCall& call, const Name& kernel, const Output& out, ForwardOutputs results) {
  const Device device = call.query.device;
  results.out = out.view(call.params.dtype);
  engine_of(device).forward(kernel.text, call.params, results, device);
}

namespace {

void forward(StableIValue* values, bool with_statistics) {
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
  Output row_top, row_mean;
  if (with_statistics) {
    row_top = call.allocate_statistic("row_top");
    row_mean = call.allocate_statistic("row_mean");
  }
  if (need_weights) call.require_weights();
  Output residual = need_residual && call.rounds() ? call.allocate_out("out_residual")
                                                   : allocate_nothing(p.dtype, call.query.device);
  run_forward(call, options.kernel_name, out,
              {{}, row_max.data, row_sum.data, residual.data, row_top.data, row_mean.data});
  if (with_statistics) {
    stack.put(out.handle, row_max.handle, row_sum.handle, residual.handle, row_top.handle, row_mean.handle);
  } else {
    stack.put(out.handle, row_max.handle, row_sum.handle, residual.handle);
  }
}

}  // namespace

void attention_forward(StableIValue* values, uint64_t, uint64_t) { forward(values, false); }

// The same, with row_top and row_mean of Note [Statistics of scores] in core/attention_params.h.
void attention_statistics(StableIValue* values, uint64_t, uint64_t) { forward(values, true); }

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
