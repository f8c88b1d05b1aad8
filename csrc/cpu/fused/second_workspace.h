// The workspace of second derivatives (backward_backward.h).
#pragma once

#include "../products/operands.h"

namespace selfattn::cpu::SELFATTN_ISA {

// It holds gradients of keys and values, in rows of whole vectors, and two numbers for each query, all in T.
template <class P>
struct SecondWorkspace {
  using T = Scalar<P>;

  int64_t key_stride, value_stride;
  int64_t rows;  // of a kv head; tiles add to 16 at a time, and rows past the last key are scratch
  int64_t keys_size, values_size, rows_size;
  T *grad_key, *grad_value, *mean, *correction;

  explicit SecondWorkspace(const AttentionParams& p, void* memory = nullptr)
      : key_stride(round_up_to_vector<T>(p.head_dim)),
        value_stride(round_up_to_vector<T>(p.value_dim)),
        rows(kDirect<P> ? p.keys : round_up(p.keys, 16)),
        keys_size(p.batch * p.kv_heads * rows * key_stride),
        values_size(p.batch * p.kv_heads * rows * value_stride),
        rows_size(p.batch * p.heads * p.queries),
        grad_key(static_cast<T*>(memory)),
        grad_value(grad_key + keys_size),
        mean(grad_value + values_size),
        correction(mean + rows_size) {}
  size_t bytes() const {
    return static_cast<size_t>(Arena::bytes_for<T>(keys_size + values_size + 2 * rows_size));
  }
};

template <class P>
size_t backward_backward_workspace(const AttentionParams& p) {
  if (!p.sequences.any()) return SecondWorkspace<P>(p).bytes();
  size_t bytes = 0;
  for (const int64_t b : elements_by_work(p, 0, kAnyQueries)) {
    bytes += SecondWorkspace<P>(element_of(p, b)).bytes();
  }
  return bytes;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
