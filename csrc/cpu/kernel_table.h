// The CPU kernels in priority order, and the choice among them.
#pragma once

#include <cstddef>
#include <string>

#include "../core/attention_params.h"
#include "../core/options.h"
#include "parallel.h"

namespace selfattn::cpu {

struct Kernel {
  const char* name;         // "fused", "loops"
  const char* isa;          // "avx512", "avx2", "scalar"
  const char* description;  // one line for people
  bool automatic;           // false: only when asked for by name

  void (*forward)(const AttentionParams&, const ForwardOutputs&, const ThreadPool&);
  void (*weights)(const AttentionParams&, const WeightsOutputs&, const ThreadPool&);
  size_t (*backward_workspace)(const AttentionParams&);
  void (*backward)(const AttentionParams&, const BackwardArguments&, const ThreadPool&);
  void (*scores)(const ScoresParams&, const ThreadPool&);
  void (*scores_backward)(const ScoresParams&, const ThreadPool&);
  void (*masked_softmax)(const SoftmaxParams&, const ThreadPool&);
  void (*masked_softmax_backward)(const SoftmaxParams&, const ThreadPool&);

  // For people: the kernel that attention calls like this one are handed on to, nullptr where they are not.
  // Null itself for kernels that never do that.
  const Kernel* (*hands_on_to)(const AttentionParams&) = nullptr;
  // Those that forward, weights and backward apply: Note [Declared options] in core/options.h. A kernel that
  // lacks some of kSequenceOptions is handed one element of a batch at a time.
  OptionSet options;
  // What is taken in this one's place where its instruction set is forced: it computes whatever it can, not
  // only what it is the fastest for. Nullptr where there is no difference.
  const Kernel* when_forced = nullptr;
};

// Every kernel compiled into this library, best first. Entries whose ISA this machine lacks are listed too.
const Kernel* const* all_kernels(int* count);

// nullptr when the machine can run the kernel, otherwise why not.
const char* unavailable_reason(const Kernel& kernel);

// The kernel a call takes. `name` is "" (automatic), "fused" or "loops". Throws std::invalid_argument with a
// sentence for people when the name or the forced ISA is unknown or cannot run here. All kernels take every
// dtype.
const Kernel& choose_kernel(const char* name);

// The forced ISA: SELFATTN_CPU_ISA on first use, or the last force_isa(). "" is automatic.
// force_isa throws std::invalid_argument for an unknown or unavailable name and then changes nothing.
std::string forced_isa();
void force_isa(const std::string& isa);

}  // namespace selfattn::cpu
