// attention_jvp: attention_forward, and its forward mode, the tangents of out and of the logsumexp.
#include "attention_forward.h"
#include "engine.h"
#include "operators.h"
#include "tangent_arguments.h"

namespace selfattn::ops {

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

}  // namespace selfattn::ops
