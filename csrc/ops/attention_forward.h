// The forward pass, behind the operators that offer it.
#pragma once

#include "attention_arguments.h"

namespace selfattn::ops {

// query, key and value of a call, and what a kernel is told about them. Borrows from the handles.
struct ForwardCall {
  Input query, key, value;
  AttentionParams params;

  ForwardCall(const TensorHandle& query_handle, const TensorHandle& key_handle,
              const TensorHandle& value_handle, double scale, const Options& options);

  // Uninitialised, laid out as query.
  Output allocate_out(const char* name) const;
  // Refuses what attention_weights of the same call could not allocate.
  void require_weights() const;
  // Uninitialised, (batch, heads, queries) as they are laid out.
  Output allocate_statistic(const char* name) const;
  // How many numbers a row statistic has.
  int64_t rows() const { return query_batch(params) * params.heads * query_rows(params); }
  // Whether rounding takes away anything that matters; see ForwardOutputs::out_residual.
  bool rounds() const { return params.dtype == DType::kBFloat16 || params.dtype == DType::kFloat16; }
};

// residual is nullable.
void run_forward(const ForwardCall& call, const Name& kernel, const Output& out, void* row_max, void* row_sum,
                 void* residual);

}  // namespace selfattn::ops
