#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

namespace selfattn_example {

std::vector<c10::IValue> call(const std::string& name, const std::vector<c10::IValue>& tensors_and_scale,
                              const Options& options) {
  const c10::OperatorHandle operation =
      c10::Dispatcher::singleton().findSchemaOrThrow(("selfattn::" + name).c_str(), "");
  std::vector<c10::IValue> stack = tensors_and_scale;
  const auto& arguments = operation.schema().arguments();
  size_t used = 0;
  for (size_t i = stack.size(); i < arguments.size(); ++i) {
    const c10::Argument& argument = arguments[i];
    const auto given = options.find(argument.name());
    used += given != options.end();
    TORCH_CHECK(given != options.end() || argument.default_value().has_value(), name, " needs ",
                argument.name());
    stack.push_back(given != options.end() ? given->second : *argument.default_value());
  }
  TORCH_CHECK(used == options.size(), "an option is unknown to ", operation.schema());
  operation.callBoxed(stack);
  return stack;
}

namespace {

class Attention : public torch::autograd::Function<Attention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value, double scale,
                            const Options& options) {
    at::AutoDispatchBelowAutograd below;  // the operators have no gradient of their own: this class is theirs
    Options with_residual = options;
    with_residual["need_residual"] = true;  // what rounding takes from 16-bit outputs, for exact gradients
    const auto results = call("attention_forward", {query, key, value, scale}, with_residual);
    const at::Tensor out = results[0].toTensor();
    context->save_for_backward(
        {query, key, value, out, results[1].toTensor(), results[2].toTensor(), results[3].toTensor()});
    context->saved_data["scale"] = scale;
    for (const auto& [name, option] : options) context->saved_data["option " + name] = option;
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    at::AutoDispatchBelowAutograd below;
    const auto saved = context->get_saved_variables();
    std::vector<c10::IValue> arguments{gradients[0]};
    for (size_t i = 0; i < 6; ++i) arguments.emplace_back(saved[i]);  // query to the row statistics
    arguments.emplace_back(context->saved_data["scale"]);
    Options options;
    for (const auto& [name, option] : context->saved_data) {
      if (name.rfind("option ", 0) == 0) options[name.substr(7)] = option;
    }
    if (saved[6].numel() != 0) options["out_residual"] = saved[6];
    const auto results = call("attention_backward", arguments, options);
    return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale,
                     const Options& options) {
  return Attention::apply(query, key, value, scale, options);
}

}  // namespace selfattn_example
