// A CPU kernel's interface: its entry points, and what the choice among kernels needs to know.
#pragma once

#include <cstddef>

#include "../core/attention_params.h"
#include "../core/options.h"
#include "../core/tangents.h"
#include "parallel.h"

namespace selfattn::cpu {

struct Kernel {
  const char* name;         // "fused", "loops"
  const char* isa;          // "avx512", "avx2", "scalar"
  const char* description;  // one line for people
  bool automatic;           // false: it runs only when asked for by name

  void (*forward)(const AttentionParams&, const ForwardOutputs&, const ThreadPool&);
  void (*weights)(const AttentionParams&, const WeightsOutputs&, const ThreadPool&);
  void (*weight_sums)(const AttentionParams&, const WeightSums&, const ThreadPool&);
  size_t (*backward_workspace)(const AttentionParams&);
  void (*backward)(const AttentionParams&, const BackwardArguments&, const ThreadPool&);
  // Adds to the gradients; nullptr if score functions are unsupported.
  void (*captured_gradients)(const AttentionParams&, const BackwardArguments&, const CapturedGradients&,
                             const ThreadPool&);
  // Forward mode and second derivatives, for calls without functions of scores. A kernel may lack all three
  // (nullptr): a call that forces it is then refused by its name.
  void (*jvp)(const AttentionParams&, const JvpArguments&, const ThreadPool&);
  size_t (*backward_backward_workspace)(const AttentionParams&);
  void (*backward_backward)(const AttentionParams&, const BackwardBackwardArguments&, const ThreadPool&);
  // Forward and backward of calls with selected keys. A kernel may lack all three, too.
  void (*selected_forward)(const AttentionParams&, const ForwardOutputs&, const ThreadPool&);
  size_t (*selected_backward_workspace)(const AttentionParams&);
  void (*selected_backward)(const AttentionParams&, const BackwardArguments&, const ThreadPool&);
  void (*scores)(const ScoresParams&, const ThreadPool&);
  void (*scores_backward)(const ScoresParams&, const ThreadPool&);
  void (*masked_softmax)(const SoftmaxParams&, const ThreadPool&);
  void (*masked_softmax_backward)(const SoftmaxParams&, const ThreadPool&);

  // Tells people which kernel computes such a call in this one's place; it returns nullptr if this one does.
  // The pointer is null for kernels that never hand a call on.
  const Kernel* (*hands_on_to)(const AttentionParams&) = nullptr;
  // The options that forward, weights, weight_sums and backward apply: Note [Declared options] in
  // core/options.h. A kernel that lacks some of kSequenceOptions gets one element of a batch at a time.
  OptionSet options;
  // The kernel that replaces this one if its instruction set is forced: it computes all calls that it can,
  // not only those for which it is the fastest. It is nullptr if there is no difference.
  const Kernel* when_forced = nullptr;
};

// The options that every pass in fused/ applies, whichever numbers it multiplies.
constexpr OptionSet kFusedOptions = {
    Option::kMask,          Option::kOwnMasks,       Option::kAlibiSlopes, Option::kSinks,
    Option::kDropout,       Option::kWindow,         Option::kQueryOffset, Option::kSoftcap,
    Option::kPackedQueries, Option::kPackedKeys,     Option::kKeyLengths,  Option::kQueryOffsets,
    Option::kPages,         Option::kBatchInvariant, Option::kFunction,    Option::kBlockMap};

// Those that the passes in sparse/ apply.
constexpr OptionSet kSelectedOptions =
    OptionSet({Option::kSelection, Option::kMask, Option::kAlibiSlopes, Option::kSinks, Option::kDropout,
               Option::kWindow, Option::kQueryOffset, Option::kSoftcap, Option::kBatchInvariant})
        .with(kSequenceOptions);

}  // namespace selfattn::cpu
