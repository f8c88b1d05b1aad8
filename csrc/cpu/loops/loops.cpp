// The entry of the loops in the kernel table.
#include "loops.h"

namespace selfattn::cpu {

namespace {

constexpr Kernel loops_kernel() {
  Kernel kernel{};
  kernel.name = "loops";
  kernel.isa = "scalar";
  kernel.description = "plain loops over queries, keys and dimensions, as the formula reads";
  kernel.automatic = false;
  kernel.forward = &loops::forward;
  kernel.weights = &loops::weights;
  kernel.weight_sums = &loops::weight_sums;
  kernel.backward_workspace = &loops::backward_workspace;
  kernel.backward = &loops::backward;
  kernel.scores = &loops::scores;
  kernel.scores_backward = &loops::scores_backward;
  kernel.masked_softmax = &loops::masked_softmax;
  kernel.masked_softmax_backward = &loops::masked_softmax_backward;
  kernel.options = {Option::kMask,    Option::kAlibiSlopes, Option::kSinks,
                    Option::kDropout, Option::kWindow,      Option::kQueryOffset,
                    Option::kSoftcap, Option::kPages,       Option::kBatchInvariant};
  return kernel;
}

}  // namespace

const Kernel kLoops = loops_kernel();

}  // namespace selfattn::cpu
