// The backward pass that several operators share: its tensors, its results, and the run.
#pragma once

#include "attention_arguments.h"

namespace selfattn::ops {

// The tensors of a backward call except the options. Statistics come as two tensors or as one.
struct BackwardTensors {
  // Takes the first five off the stack, with which all backward operators begin.
  explicit BackwardTensors(Stack& stack)
      : grad_out(stack.tensor()),
        query(stack.tensor()),
        key(stack.tensor()),
        value(stack.tensor()),
        out(stack.tensor()) {}

  TensorHandle grad_out, query, key, value, out;
  TensorHandle row_max, row_sum;  // (batch, heads, queries)
  TensorHandle statistics;        // (2, batch, heads, queries): both of them, which are then empty
  TensorHandle out_residual;      // nullable
  TensorHandle grad_row;          // nullable
  TensorHandle grad_weights;      // nullable
  TensorHandle grad_mean, grad_sink, grad_keys;  // nullable, see Note [Statistics of scores]

  // Takes the optional ones off the stack.
  void take_optional(Stack& stack);
};

// The inputs of a backward kernel; GradientResults adds the results.
struct BackwardCall {
  HeadsFirst forms[3];
  Input query, key, value;
  AttentionParams params;
  BackwardArguments arguments;

  // Copies inputs where a kernel needs another layout, which replaces their handles.
  BackwardCall(BackwardTensors& tensors, double scale, const Options& options);
  BackwardCall(const BackwardCall&) = delete;
};

// The gradients of mask, slopes and sinks have no handle if there is no such gradient.
struct Gradients {
  DType dtype = DType::kFloat32;
  Device device;
  Output query, key, value, mask, slopes, sinks;

  // Gives missing gradients an empty tensor, because the schema asks for one.
  void allocate_missing();
};

// The tensors that a kernel writes gradients to, and the last step after it. Borrows from call and options.
class GradientResults {
 public:
  // Allocates them and stores their addresses in the arguments.
  GradientResults(const BackwardCall& call, bool need_mask_grad, const Options& options,
                  BackwardArguments& arguments);
  // Must be called once the kernel has run.
  Gradients finish();

 private:
  const BackwardCall& call_;
  const Options& options_;
  Gradients grads_;
  Output slopes_rows_, sinks_rows_;
};

Gradients run_backward(BackwardTensors& tensors, double scale, bool need_mask_grad, const Options& options);

}  // namespace selfattn::ops
