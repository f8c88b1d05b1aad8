// A backward call of sm80.
#pragma once

#include <cstddef>

#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm80::backward {

// Whether these kernels compute the gradients of such a call: otherwise simt does.
bool takes(const AttentionParams& params);

// The workspace holds the statistics, and what the mask's gradient needs.
size_t workspace_bytes(const AttentionParams& params, const BackwardArguments& arguments);
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);

}  // namespace selfattn::cuda::sm80::backward
