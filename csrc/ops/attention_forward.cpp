// attention_forward: out = softmax(scores) @ value, with the row statistics that the backward needs.
#include "attention_arguments.h"
#include "run_kernel.h"

namespace selfattn::ops {

namespace {

void attention_forward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle query_handle = stack.tensor();
  const TensorHandle key_handle = stack.tensor();
  const TensorHandle value_handle = stack.tensor();
  const double scale = stack.number();
  const bool need_residual = stack.flag();
  const Options options(stack);

  const Input query = inspect("query", query_handle);
  const Input key = inspect("key", key_handle);
  const Input value = inspect("value", value_handle);
  const AttentionParams p = attention_params(query, key, &value, scale, options);
  const cpu::Kernel& kernel = cpu::choose_kernel(options.kernel.text);

  const DType accumulation = accumulation_dtype(p.dtype);
  Output out = allocate_like("out", {p.batch, p.heads, p.queries, p.value_dim}, p.dtype, query);
  Output row_max = allocate("row_max", {p.batch, p.heads, p.queries}, accumulation);
  Output row_sum = allocate("row_sum", {p.batch, p.heads, p.queries}, accumulation);
  // Only rounding to 16 bits takes away anything that matters; see ForwardOutputs.
  const bool rounds = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  Output residual;
  if (need_residual && rounds) {
    residual = allocate_like("out_residual", {p.batch, p.heads, p.queries, p.value_dim}, p.dtype, query);
  } else {
    residual = allocate_nothing(p.dtype);
    residual.data = nullptr;
  }
  if (row_max.bytes > 0) {
    run_kernel(kernel.forward, p,
               ForwardOutputs{out.view(p.dtype), row_max.data, row_sum.data, residual.data});
  }
  stack.put(out.handle, row_max.handle, row_sum.handle, residual.handle);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SELFATTN_NAMESPACE, CPU, library) {
  library.impl("attention_forward", &attention_forward);
}

}  // namespace selfattn::ops
