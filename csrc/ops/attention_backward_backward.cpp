// attention_backward_backward: second derivatives; see Note [Second derivatives] in core/tangents.h.
#include "attention_backward.h"
#include "engine.h"
#include "operators.h"
#include "tangent_arguments.h"

namespace selfattn::ops {

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
