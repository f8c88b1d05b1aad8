// The CUDA kernels in priority order, and the choice among them. Plain C++: whoever includes this needs no
// CUDA headers.
#pragma once

#include <cstddef>
#include <string>

#include "../core/attention_params.h"
#include "../core/options.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace selfattn::cuda {

struct Launch {
  CUstream_st* stream = nullptr;  // nullptr is CUDA's default stream
  // Device memory of as many bytes as the kernel's function for it says, 256-byte aligned; nullable when that
  // is 0.
  void* workspace = nullptr;
};

// A kernel is launched on the current device and returns before it has run. It reads device memory on the
// device only, allocates nothing and waits for nothing, so that CUDA graphs can capture it. Errors of a
// launch are thrown as std::runtime_error.
struct Kernel {
  const char* name;         // "sm80", "simt"
  const char* description;  // one line for people

  // Those that forward, weights and backward apply: Note [Declared options] in core/options.h.
  OptionSet options;

  // nullptr where the kernel takes such calls on devices of compute capability major*10 + minor, otherwise a
  // phrase for people that says why not.
  const char* (*refuses)(const AttentionParams&, int capability);

  // Bytes of Launch::workspace. They depend on the shape only, never on the device.
  size_t (*forward_workspace)(const AttentionParams&);
  void (*forward)(const AttentionParams&, const ForwardOutputs&, const Launch&);
  void (*weights)(const AttentionParams&, const WeightsOutputs&, const Launch&);

  // BackwardArguments::workspace is not used: the memory is the launch's. Gradients of float masks must be
  // zero on entry.
  size_t (*backward_workspace)(const AttentionParams&, const BackwardArguments&);
  void (*backward)(const AttentionParams&, const BackwardArguments&, const Launch&);

  // Null for kernels that leave these to "simt", which has them all.
  void (*scores)(const ScoresParams&, const Launch&);
  void (*scores_backward)(const ScoresParams&, const Launch&);
  void (*masked_softmax)(const SoftmaxParams&, const Launch&);
  void (*masked_softmax_backward)(const SoftmaxParams&, const Launch&);
};

// Every kernel compiled into this library, best first.
const Kernel* const* all_kernels(int* count);

// Why the kernel does not take a call on devices of compute capability major*10 + minor, a phrase for people;
// empty where it does.
std::string refusal_of(const Kernel& kernel, const AttentionParams& params, int capability);

// The kernel that an attention call takes. `name` is "" (automatic) or a kernel's name. Throws
// std::invalid_argument with a sentence for people when the name is unknown, or when the kernel asked for
// refuses the call, or when all of them do.
const Kernel& choose_kernel(const char* name, const AttentionParams& params, int capability);

}  // namespace selfattn::cuda
