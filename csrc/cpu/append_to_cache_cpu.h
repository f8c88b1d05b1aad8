// Appends new keys and values to a cache by copying them.
#pragma once

#include "../core/append_params.h"
#include "parallel.h"

namespace selfattn::cpu {

void append_to_cache(const AppendParams& append, const ThreadPool& pool);

}  // namespace selfattn::cpu
