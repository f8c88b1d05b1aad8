// What attention_forward, attention_weights and attention_backward have in common: their arguments, checked
// and turned into AttentionParams.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "../cpu/kernel_table.h"
#include "checks.h"
#include "outputs.h"

namespace selfattn::ops {

// The keyword arguments of SELFATTN_OPTIONS in library.cpp, in that order.
struct Options {
  TensorHandle attn_mask;
  TensorHandle alibi_slopes;
  TensorHandle sinks;
  TensorHandle dropout_seed;
  double dropout_p = 0.0;
  bool is_causal = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t query_offset = 0;
  double softcap = 0.0;
  TensorHandle cu_seqlens_q;
  TensorHandle cu_seqlens_k;
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  TensorHandle seqlens_k;
  TensorHandle query_offsets;
  TensorHandle block_table;
  std::optional<std::vector<int64_t>> mask_shapes;
  Name kernel;
  Name float32_precision = {"highest"};

  std::vector<OwnMask> own_masks;  // those of mask_shapes, for whoever describes the call to a kernel

  explicit Options(Stack& stack);
  // Whether batch elements have lengths or places of their own.
  bool has_lengths() const {
    return cu_seqlens_q || cu_seqlens_k || seqlens_k || query_offsets || block_table;
  }
  // Everything at its default.
  explicit Options(bool is_causal) : is_causal(is_causal) {}
};

// In sequence_arguments.cpp: lengths, offsets and pages, and the batch and lengths that follow from them.
void add_sequences(AttentionParams& params, const Input& query, const Input& key, const Options& options);
// Masks of which each sequence has its own, one behind the other in attn_mask.
std::vector<OwnMask> own_masks(const std::vector<int64_t>& shapes);
void add_own_masks(AttentionParams& params, const Input& mask, const Options& options, Device device);

// Checks everything that the three ops share and describes it for a kernel. `value` is nullptr for the op
// that does without.
AttentionParams attention_params(const Input& query, const Input& key, const Input* value, double scale,
                                 const Options& options);

// Shapes, dtypes and strides of (batch, heads, queries, head_dim) and (batch, kv_heads, keys, head_dim),
// which may differ in the batch where lengths are given.
void check_query_and_key(const Input& query, const Input& key, bool same_batch = true);

// The shape of row statistics and the rows of tensors shaped as query or key: (batch, heads, queries) of the
// call, or one batch of all rows where they are packed.
int64_t query_batch(const AttentionParams& params);
int64_t query_rows(const AttentionParams& params);
// Whether packed tensors have, or may have, rows behind the last sequence. Those of results are 0.
bool leaves_rows_out(const AttentionParams& params, Device device);

// The result of attention_weights, uninitialised.
Output allocate_weights(const AttentionParams& params, Device device);

// (batch, heads, queries) statistics in the accumulation type; a copy is made where they are not contiguous.
const void* row_statistics(TensorHandle& handle, Input& input, const AttentionParams& params);

// The same for a (2, batch, heads, queries) tensor of row_max and row_sum.
std::pair<const void*, const void*> pair_of_row_statistics(TensorHandle& handle, Input& input,
                                                           const AttentionParams& params);

double finite_scale(double scale, DType dtype);
int64_t checked_query_offset(int64_t query_offset);

// float64, float32, bfloat16, float16 or bool, else a refusal.
DType mask_dtype(const Input& mask);
// The view of a mask that broadcasts to (batch, heads, queries, keys).
View mask_view(const Input& mask, int64_t batch, int64_t heads, int64_t queries, int64_t keys);

}  // namespace selfattn::ops
