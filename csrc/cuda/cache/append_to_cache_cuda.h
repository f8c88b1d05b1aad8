// Copies new keys and values into a cache, behind those that it holds.
#pragma once

#include "../../core/append_params.h"
#include "../common/launch.h"

namespace selfattn::cuda {

// The lengths, starts and page numbers have not been checked: rows that they would put outside of the cache
// are left out.
void append_to_cache(const AppendParams& append, const Launch& where);

}  // namespace selfattn::cuda
