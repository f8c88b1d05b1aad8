// The operators of selfattn_ext by name, and attention with a gradient made of two of them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

namespace selfattn_example {

// Arguments by name, such as {"is_causal", true} or {"window_left", 128}.
using Options = std::map<std::string, c10::IValue>;

// Calls torch.ops.selfattn.<name>. `tensors_and_scale` are the arguments before the first option, in order;
// the options that are not given keep their defaults. Throws c10::Error where an argument is wrong.
std::vector<c10::IValue> call(const std::string& name, const std::vector<c10::IValue>& tensors_and_scale,
                              const Options& options);

// softmax(scale * query @ key^T) @ value with a gradient.
//
// query (B,H,L,E), key (B,Hk,S,E), value (B,Hk,S,Ev), all of one floating-point type, H a multiple of Hk; out
// (B,H,L,Ev). `options` are those of the operator attention_forward that are no tensors.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale,
                     const Options& options = {});

}  // namespace selfattn_example
