// The gradients of queries, keys and values by sm90.
#pragma once

#include "../../mma/backward/backward_plan.h"

namespace selfattn::cuda::sm90::backward {

// Whether these kernels compute the gradients of a call that the forward's take: otherwise sm80 does.
bool takes(const AttentionParams& params, const BackwardArguments& arguments);

// Chooses the kernels for the call's element type and dims.
void run(const AttentionParams& params, const BackwardArguments& arguments,
         const mma::backward::Statistics& statistics, CUstream_st* stream);

}  // namespace selfattn::cuda::sm90::backward
