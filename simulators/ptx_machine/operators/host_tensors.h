// CUDA tensors as CPU tensors on the same memory, for one call of one of torch's operators.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>
#include <vector>

namespace ptx_machine {

// New results: each on the device, and where the CPU's operator has put it.
using NewResults = std::vector<std::pair<at::Tensor, at::Tensor>>;

// Converts the arguments of an operator, and its results back.
class HostCall {
 public:
  // `captured` calls draw the same random numbers at each launch; a `trial` runs on zeros, for the shapes of
  // its results.
  HostCall(bool captured, bool trial) : captured_(captured), trial_(trial) {}

  // Replaces the arguments, from `begin` on.
  void convert(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t begin);
  // Returns the device's tensor for a result: an argument, a view of one, or a new tensor, which is added to
  // `made`.
  at::Tensor device_of(const at::Tensor& result, NewResults* made);
  // Returns whether a result lies in an argument's memory.
  bool is_argument(const at::Tensor& result) const;
  // Copies arguments that the operator wrote, and that were moved or resized on the host, to the device.
  void write_back() const;
  // Does the same for a trial, for sizes alone.
  void resize_written() const;

  std::optional<at::Generator> generator;  // the generator that the operator draws from

 private:
  struct Pair {
    at::Tensor device, host;
    bool written = false;
  };

  at::Tensor convert(const at::Tensor& tensor, bool written);
  at::Generator draw_from(const at::Generator* given) const;

  std::vector<Pair> pairs_;
  bool captured_, trial_;
};

// Returns the memory of a CUDA tensor as a CPU tensor; other tensors stay as they are.
at::Tensor on_host(const at::Tensor& tensor);
void copy_elements(const at::Tensor& device, const at::Tensor& host);

}  // namespace ptx_machine
