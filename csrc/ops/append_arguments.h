// New keys and values for a cache: the arguments that the appending operators share, checked.
#pragma once

#include "../core/append_params.h"
#include "checks.h"

namespace selfattn::ops {

// The tensors of an append, borrowed; the operators own them.
struct AppendTensors {
  const TensorHandle& key_cache;
  const TensorHandle& value_cache;
  TensorHandle& key;
  TensorHandle& value;
  TensorHandle& seqlens;      // (B,) int64: lengths before the new rows, or with them
  TensorHandle& cu_seqlens;   // nullable; (B+1,) int64: key and value are packed
  TensorHandle& block_table;  // nullable; (B, pages) int32: the caches are pages
};

// The caches that an append writes to.
struct WrittenCaches {
  Input key, value;

  // Replaces an input by a copy if it may share memory with the caches, so that the operator reads what the
  // caller gave. A query in the row that is written is an example.
  void keep_apart(TensorHandle& handle, Input& input) const;
  void keep_apart(const char* name, TensorHandle& handle) const;  // nullable
};

// The constructor refuses everything about an append that can be refused, and writes nothing. On CUDA it does
// not see the values of lengths and tables, and the kernel leaves out rows that would fall outside.
struct Append {
  Device device;
  WrittenCaches caches;
  AppendParams rows;

  Append(const AppendTensors& tensors, bool lengths_after);
  void run() const;
};

}  // namespace selfattn::ops
