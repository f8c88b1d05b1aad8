// The interface of a CUDA kernel: an entry of the kernel table. Plain C++.
#pragma once

#include <cstddef>

#include "../core/attention_params.h"
#include "../core/options.h"
#include "../core/tangents.h"
#include "common/launch.h"

namespace selfattn::cuda {

// Its functions launch kernels on the current device and return before these have run. They read device
// memory only on the device, allocate nothing and wait for nothing, so that CUDA graphs can capture them.
// Errors of a launch are thrown as std::runtime_error.
struct Kernel {
  const char* name = nullptr;         // "sm80", "simt"
  const char* description = nullptr;  // one line for people

  // The options that forward, weights and backward apply: Note [Declared options] in core/options.h.
  OptionSet options;

  // Returns nullptr if the kernel takes such calls on devices of compute capability major*10 + minor,
  // otherwise a phrase for people that says why not.
  const char* (*refuses)(const AttentionParams&, int capability) = nullptr;

  // Bytes of Launch::workspace. They depend on the shape only, never on the device.
  size_t (*forward_workspace)(const AttentionParams&) = nullptr;
  void (*forward)(const AttentionParams&, const ForwardOutputs&, const Launch&) = nullptr;
  void (*weights)(const AttentionParams&, const WeightsOutputs&, const Launch&) = nullptr;

  // The workspace is Launch::workspace; BackwardArguments::workspace is not used. Gradients of float masks
  // must be zero on entry.
  size_t (*backward_workspace)(const AttentionParams&, const BackwardArguments&) = nullptr;
  void (*backward)(const AttentionParams&, const BackwardArguments&, const Launch&) = nullptr;

  // The rest is null for kernels that leave it to "simt", which has all of it. The workspace of jvp is the
  // forward's.
  void (*jvp)(const AttentionParams&, const JvpArguments&, const Launch&) = nullptr;
  // The workspace is Launch::workspace, of backward_backward_workspace() bytes.
  size_t (*backward_backward_workspace)(const AttentionParams&, const BackwardBackwardArguments&) = nullptr;
  void (*backward_backward)(const AttentionParams&, const BackwardBackwardArguments&,
                            const Launch&) = nullptr;
  // Fills row_top and row_mean, once forward has filled the other row statistics; for calls that ask for
  // them. Kernels that have it apply gradients of statistics, too.
  void (*statistics)(const AttentionParams&, const ForwardOutputs&, const Launch&) = nullptr;
  void (*weight_sums)(const AttentionParams&, const WeightSums&, const Launch&) = nullptr;
  // Adds the gradients of the tensors that the call's function reads to the sums. Is called only if some are
  // wanted, with a workspace of captured_workspace() bytes.
  size_t (*captured_workspace)(const AttentionParams&, const CapturedGradients&) = nullptr;
  void (*captured_gradients)(const AttentionParams&, const BackwardArguments&, const CapturedGradients&,
                             const Launch&) = nullptr;
  void (*scores)(const ScoresParams&, const Launch&) = nullptr;
  void (*scores_backward)(const ScoresParams&, const Launch&) = nullptr;
  void (*masked_softmax)(const SoftmaxParams&, const Launch&) = nullptr;
  void (*masked_softmax_backward)(const SoftmaxParams&, const Launch&) = nullptr;
};

}  // namespace selfattn::cuda
