// Attention with no option but the causal rule, for eager calls on small tensors.
//
// These operators are attention_forward and attention_backward with few arguments, and one of them returns
// out alone. A call on small tensors takes a few microseconds, most of them outside the kernel: each argument
// costs its conversion even at its default, and each result costs an allocation.
#include <cmath>

#include "attention_backward.h"
#include "attention_forward.h"
#include "operators.h"

namespace selfattn::ops {

namespace {

// The default is 1 / sqrt(head_dim), in the same arithmetic as Python's head_dim ** -0.5.
double scale_or_default(std::optional<double> scale, const TensorHandle& query_handle) {
  if (scale) return *scale;
  const Input query = inspect("query", query_handle);
  const int64_t head_dim = query.rank > 0 ? query.size[query.rank - 1] : 0;
  return head_dim > 0 ? std::pow(static_cast<double>(head_dim), -0.5) : 1.0;
}

// The arguments of both forwards, in the order in which they lie on the stack.
struct Arguments {
  TensorHandle query, key, value;
  std::optional<double> scale;
  Options options;
  bool enable_gqa;
  ForwardCall call;

  explicit Arguments(Stack& stack)
      : query(stack.tensor()),
        key(stack.tensor()),
        value(stack.tensor()),
        scale(stack.optional_number()),
        options(stack.flag()),
        enable_gqa(stack.flag()),
        call(query, key, value, scale_or_default(scale, query), options) {
    // The public functions have the same rule: one kv head serves all, other counts need enable_gqa.
    const AttentionParams& p = call.params;
    if (p.kv_heads != p.heads && p.kv_heads != 1 && !enable_gqa) {
      refuse("key has ", p.kv_heads, " heads and query ", p.heads, ", which needs enable_gqa");
    }
  }
};

// An undefined tensor, which is None in Python.
TensorHandle nothing() {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_uninitialized_tensor(&handle) != TORCH_SUCCESS) {
    throw AllocationFailure("not enough memory for a tensor");
  }
  return TensorHandle(handle);
}

}  // namespace

void basic_attention(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const Arguments arguments(stack);
  const ForwardCall& call = arguments.call;
  Output out = call.allocate_out("out");
  const int64_t bytes = call.rows() * size_of(accumulation_dtype(call.params.dtype));
  const Scratch statistics("the row statistics", 2 * bytes, call.query.device);
  run_forward(call, arguments.options.kernel_name, out, statistics.data(), statistics.data() + bytes,
              nullptr);
  stack.put(out.handle);
}

void basic_attention_forward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const Arguments arguments(stack);
  const ForwardCall& call = arguments.call;
  const AttentionParams& p = call.params;
  Output out = call.allocate_out("out");
  Output statistics = allocate("statistics", {2, p.batch, p.heads, p.queries}, accumulation_dtype(p.dtype),
                               call.query.device);
  Output residual;
  if (call.rounds()) {
    residual = call.allocate_out("out_residual");
  } else {
    residual.handle = nothing();
  }
  char* row_max = static_cast<char*>(statistics.data);
  run_forward(call, arguments.options.kernel_name, out, row_max, row_max + statistics.bytes / 2,
              residual.data);
  stack.put(out.handle, statistics.handle, residual.handle);
}

void basic_attention_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  BackwardTensors tensors(stack);
  tensors.statistics = stack.tensor();
  tensors.out_residual = stack.optional_tensor();
  const std::optional<double> scale = stack.optional_number();
  const Options options(stack.flag());

  Gradients grads = run_backward(tensors, scale_or_default(scale, tensors.query), false, options);
  stack.put(grads.query.handle, grads.key.handle, grads.value.handle);
}

}  // namespace selfattn::ops
