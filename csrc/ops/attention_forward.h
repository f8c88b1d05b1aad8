// The forward pass that several operators share: its checked arguments, its results, and the run.
#pragma once

#include "attention_arguments.h"

namespace selfattn::ops {

// query, key and value of a call, and their description for a kernel. Borrows from the handles.
struct ForwardCall {
  bool rows_first;
  HeadsFirst forms[3];
  Input query, key, value;
  AttentionParams params;

  ForwardCall(const TensorHandle& query_handle, const TensorHandle& key_handle,
              const TensorHandle& value_handle, double scale, const Options& options);
  ForwardCall(const ForwardCall&) = delete;

  // The result is uninitialised and has the layout of query.
  Output allocate_out(const char* name) const;
  // Refuses a call whose attention_weights could not be allocated.
  void require_weights() const;
  // The result is uninitialised and has the shape of row statistics.
  Output allocate_statistic(const char* name) const;
  // How many numbers a row statistic has.
  int64_t rows() const { return query_batch(params) * params.heads * query_rows(params); }
  // Whether the backward needs the rounding errors of out; see ForwardOutputs::out_residual.
  bool rounds() const { return params.dtype == DType::kBFloat16 || params.dtype == DType::kFloat16; }
};

// row_max and row_sum are wanted; what else is null is not.
void run_forward(const ForwardCall& call, const Name& kernel, const Output& out, ForwardOutputs results);

}  // namespace selfattn::ops
