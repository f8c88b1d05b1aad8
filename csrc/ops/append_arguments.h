// New keys and values for a cache, behind the operators that append them.
#pragma once

#include "../core/cache_append.h"
#include "checks.h"

namespace selfattn::ops {

// The tensors of an append, borrowed; the operators own them.
struct AppendTensors {
  const TensorHandle& key_cache;
  const TensorHandle& value_cache;
  const TensorHandle& key;
  const TensorHandle& value;
  const TensorHandle& seqlens;      // (B,) int64: lengths before the new rows, or with them
  const TensorHandle& cu_seqlens;   // nullable; (B+1,) int64: key and value are packed
  const TensorHandle& block_table;  // nullable; (B, pages) int32: the caches are pages
};

// Everything about an append that can be refused is refused here, and nothing is written yet. On CUDA nobody
// looks at the values of lengths and tables, and the kernel leaves out whatever would fall outside.
CacheAppend cache_append(const AppendTensors& tensors, bool lengths_after);

void run_append(const CacheAppend& append, Device device);

}  // namespace selfattn::ops
