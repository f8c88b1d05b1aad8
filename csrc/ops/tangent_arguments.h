// The tangents of query, key, value, attn_mask, alibi_slopes and sinks, as operators take them.
#pragma once

#include <string>

#include "../core/tangents.h"
#include "attention_arguments.h"

namespace selfattn::ops {

struct TangentTensors {
  // Takes them off the stack in the order of the schema.
  explicit TangentTensors(Stack& stack)
      : query(stack.optional_tensor()),
        key(stack.optional_tensor()),
        value(stack.optional_tensor()),
        mask(stack.optional_tensor()),
        slopes(stack.optional_tensor()),
        sinks(stack.optional_tensor()) {}

  static std::string schema() {
    return "Tensor? tangent_query=None, Tensor? tangent_key=None, Tensor? tangent_value=None, "
           "Tensor? tangent_mask=None, Tensor? tangent_slopes=None, Tensor? tangent_sinks=None, ";
  }

  TensorHandle query, key, value, mask, slopes, sinks;
};

// Checks them, and copies those whose last dimension is not dense, which replaces their handles.
Tangents checked_tangents(TangentTensors& tangents, const AttentionParams& params, const Input& query,
                          const Input& key, const Input& value, const Options& options);

// The tangents of attention's results, which both operators return: (batch, heads, queries, value_dim) in the
// query's layout, and a row statistic. They are filled with zeros if kernels may leave rows out.
struct ResultTangents {
  Output out, lse;
};
ResultTangents allocate_tangents(const AttentionParams& params, const Input& query);

}  // namespace selfattn::ops
