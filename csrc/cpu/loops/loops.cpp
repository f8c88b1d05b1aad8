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
    /*hands_on_to=*/nullptr,
    /*options=*/
    {Option::kMask, Option::kAlibiSlopes, Option::kSinks, Option::kDropout, Option::kWindow,
     Option::kQueryOffset, Option::kSoftcap, Option::kPages},
};

}  // namespace selfattn::cpu
