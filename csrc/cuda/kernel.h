// What a CUDA kernel offers: an entry of the kernel table. Plain C++.
#pragma once

#include <cstddef>

#include "../core/attention_params.h"
#include "../core/options.h"
#include "../core/tangents.h"
#include "common/launch.h"

namespace selfattn::cuda {

// A kernel is launched on the current device and returns before it has run. It reads device memory on the
// device only, allocates nothing and waits for nothing, so that CUDA graphs can capture it. Errors of a
// launch are thrown as std::runtime_error.
struct Kernel {
  const char* name = nullptr;         // "sm80", "simt"
  const char* description = nullptr;  // one line for people

  // Those that forward, weights and backward apply: Note [Declared options] in core/options.h.
  OptionSet options;

  // nullptr where the kernel takes such calls on devices of compute capability major*10 + minor, otherwise a
  // phrase for people that says why not.
  const char* (*refuses)(const AttentionParams&, int capability) = nullptr;

  // Bytes of Launch::workspace. They depend on the shape only, never on the device.
  size_t (*forward_workspace)(const AttentionParams&) = nullptr;
  void (*forward)(const AttentionParams&, const ForwardOutputs&, const Launch&) = nullptr;
  void (*weights)(const AttentionParams&, const WeightsOutputs&, const Launch&) = nullptr;

  // BackwardArguments::workspace is not used: the memory is the launch's. Gradients of float masks must be
  // zero on entry.
  size_t (*backward_workspace)(const AttentionParams&, const BackwardArguments&) = nullptr;
  void (*backward)(const AttentionParams&, const BackwardArguments&, const Launch&) = nullptr;

  // Null for kernels that leave these to "simt", which has them all. The workspace of jvp is the forward's.
  void (*jvp)(const AttentionParams&, const JvpArguments&, const Launch&) = nullptr;
  // As backward: the memory is the launch's, of backward_backward_workspace() bytes.
  size_t (*backward_backward_workspace)(const AttentionParams&, const BackwardBackwardArguments&) = nullptr;
  void (*backward_backward)(const AttentionParams&, const BackwardBackwardArguments&,
                            const Launch&) = nullptr;
  // The gradients of what the call's function reads, added to the sums; some are wanted. The workspace is
  // theirs.
  size_t (*captured_workspace)(const AttentionParams&, const CapturedGradients&) = nullptr;
  void (*captured_gradients)(const AttentionParams&, const BackwardArguments&, const CapturedGradients&,
                             const Launch&) = nullptr;
  void (*scores)(const ScoresParams&, const Launch&) = nullptr;
  void (*scores_backward)(const ScoresParams&, const Launch&) = nullptr;
  void (*masked_softmax)(const SoftmaxParams&, const Launch&) = nullptr;
  void (*masked_softmax_backward)(const SoftmaxParams&, const Launch&) = nullptr;
};

}  // namespace selfattn::cuda
