// A backward call of sm80, and its kernels for the mask's gradient.
#pragma once

#include <cstddef>

#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm80::backward {

// Whether these kernels compute the gradients of such a call: otherwise simt does.
bool takes(const AttentionParams& params);

// Workspace: statistics_bytes(), and what the mask's gradient needs.
size_t workspace_bytes(const AttentionParams& params, const BackwardArguments& arguments);
void run(const AttentionParams& params, const BackwardArguments& arguments, const Launch& where);

}  // namespace selfattn::cuda::sm80::backward
