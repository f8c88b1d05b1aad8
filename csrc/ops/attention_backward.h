// The backward pass, behind the operators that offer it.
#pragma once

#include "attention_arguments.h"

namespace selfattn::ops {

// The tensors of a backward call beside the options. Statistics come as two tensors or as one.
struct BackwardTensors {
  // Takes the first five, with which both operators begin, off the stack.
  explicit BackwardTensors(Stack& stack)
      : grad_out(stack.tensor()),
        query(stack.tensor()),
        key(stack.tensor()),
        value(stack.tensor()),
        out(stack.tensor()) {}

  TensorHandle grad_out, query, key, value, out;
  TensorHandle row_max, row_sum;  // (batch, heads, queries)
  TensorHandle statistics;        // (2, batch, heads, queries): both of them; then those are empty
  TensorHandle out_residual;      // nullable
  TensorHandle grad_row;          // nullable
  TensorHandle grad_weights;      // nullable
};

// What a kernel is told, but for results.
struct BackwardCall {
  Input query, key, value;
  AttentionParams params;
  BackwardArguments arguments;

  // Copies inputs where a kernel needs another layout, which replaces their handles.
  BackwardCall(BackwardTensors& tensors, double scale, const Options& options);
};

// Those of mask, slopes and sinks have no handle where there is no such gradient.
struct Gradients {
  DType dtype = DType::kFloat32;
  Device device;
  Output query, key, value, mask, slopes, sinks;

  // Gives these handles of nothing, for the schema.
  void allocate_missing();
};

// Where a kernel writes the gradients of a call, and their last step. Borrows from the call and the options.
class GradientResults {
 public:
  // Allocates them and tells the arguments.
  GradientResults(const BackwardCall& call, bool need_mask_grad, const Options& options,
                  BackwardArguments& arguments);
  // To be called once the kernel has run.
  Gradients finish();

 private:
  const BackwardCall& call_;
  const Options& options_;
  Gradients grads_;
  Output slopes_rows_, sinks_rows_;
};

Gradients run_backward(BackwardTensors& tensors, double scale, bool need_mask_grad, const Options& options);

}  // namespace selfattn::ops
