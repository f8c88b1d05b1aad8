// Reads the options off the stack, and writes their part of the schema.
#include "attention_options.h"

#include "attention_arguments.h"

namespace selfattn::ops {

namespace {

void read(Stack& stack, TensorHandle& field) { field = stack.optional_tensor(); }
void read(Stack& stack, double& field) { field = stack.number(); }
void read(Stack& stack, bool& field) { field = stack.flag(); }
void read(Stack& stack, int64_t& field) { field = stack.integer(); }
void read(Stack& stack, Name& field) { field = stack.name(); }
void read(Stack& stack, std::optional<Name>& field) { field = stack.optional_name(); }
void read(Stack& stack, std::optional<std::vector<int64_t>>& field) { field = stack.optional_integers(); }
void read(Stack& stack, std::optional<std::vector<double>>& field) { field = stack.optional_numbers(); }
void read(Stack& stack, std::vector<TensorHandle>& field) { field = stack.optional_tensors(); }

std::string declaration(const std::string& name, const TensorHandle&) { return "Tensor? " + name + "=None"; }
std::string declaration(const std::string& name, double value) {
  return "float " + name + "=" + std::to_string(value);
}
std::string declaration(const std::string& name, bool value) {
  return "bool " + name + (value ? "=True" : "=False");
}
std::string declaration(const std::string& name, int64_t value) {
  return "SymInt " + name + "=" + std::to_string(value);
}
std::string declaration(const std::string& name, const Name& value) {
  return "str " + name + "=\"" + value.text + "\"";
}
std::string declaration(const std::string& name, const std::optional<Name>&) {
  return "str? " + name + "=None";
}
std::string declaration(const std::string& name, const std::optional<std::vector<int64_t>>&) {
  return "SymInt[]? " + name + "=None";
}
std::string declaration(const std::string& name, const std::optional<std::vector<double>>&) {
  return "float[]? " + name + "=None";
}
std::string declaration(const std::string& name, const std::vector<TensorHandle>&) {
  return "Tensor[]? " + name + "=None";
}

}  // namespace

Options::Options(Stack& stack) {
  each(*this, [&stack](const char*, auto& field) { read(stack, field); });
  if (mask_shapes) own_masks = ops::own_masks(*mask_shapes);
  if (!captured.empty()) captured_tensors = ops::captured_tensors(captured);
}

std::string Options::schema() {
  std::string text;
  const Options defaults;
  each(defaults, [&text](const char* name, const auto& field) {
    text += (text.empty() ? "" : ", ") + declaration(name, field);
  });
  return text;
}

}  // namespace selfattn::ops
