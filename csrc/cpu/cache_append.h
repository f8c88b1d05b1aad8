// Copies new keys and values behind those of a cache.
#pragma once

#include "../core/cache_append.h"
#include "parallel.h"

namespace selfattn::cpu {

void append_to_cache(const CacheAppend& append, const ThreadPool& pool);

}  // namespace selfattn::cpu
