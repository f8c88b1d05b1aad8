#include "loops.h"

namespace selfattn::cpu {

const Kernel kLoops = {
    "loops",
    "scalar",
    "plain loops over queries, keys and dimensions, as the formula reads",
    /*automatic=*/false,
    &loops::forward,
    &loops::weights,
    &loops::backward_workspace,
    &loops::backward,
    &loops::scores,
    &loops::scores_backward,
    &loops::masked_softmax,
    &loops::masked_softmax_backward,
};

}  // namespace selfattn::cpu
