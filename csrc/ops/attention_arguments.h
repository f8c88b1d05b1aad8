// Arguments shared by the attention operators, checked and turned into AttentionParams.
#pragma once

#include <utility>
#include <vector>

#include "../core/attention_params.h"
#include "attention_options.h"
#include "checks.h"
#include "outputs.h"

namespace selfattn::ops {

// In sequence_arguments.cpp: lengths, offsets and pages, and the batch and lengths that follow from them.
void add_sequences(AttentionParams& params, const Input& query, const Input& key, const Options& options);
// Masks that belong to one sequence each, stored end to end in attn_mask.
std::vector<OwnMask> own_masks(const std::vector<int64_t>& shapes);
void add_own_masks(AttentionParams& params, const Input& mask, const Options& options, Device device);

// In score_functions.cpp: the function of scores and the map of blocks. They borrow from the
// options, which must outlive the call.
std::vector<CapturedTensor> captured_tensors(const std::vector<TensorHandle>& captured);
void add_score_function(AttentionParams& params, const Input& query, const Options& options);

// In selection.cpp: the lists of selected keys.
void add_selection(AttentionParams& params, const Input& query, const Options& options);
// These throw if a call with selected keys asks for results that no kernel computes from lists.
void check_selected(const AttentionParams& params, const ForwardOutputs& outputs);
void check_selected(const AttentionParams& params, const BackwardArguments& arguments);

// Returns an argument with four dimensions, which packed rows of users do not have. Borrows from `form`.
inline Input seen(const Input& input, const Options& options, HeadsFirst& form) {
  return options.offsets ? form.of(input) : input;
}

// Checks everything that the operators share and describes it for a kernel. `value` is nullptr for
// attention_weights, which has none.
AttentionParams attention_params(const Input& query, const Input& key, const Input* value, double scale,
                                 const Options& options);

// Shapes, dtypes and strides of (batch, heads, queries, head_dim) and (batch, kv_heads, keys, head_dim),
// which may differ in the batch where lengths are given.
void check_query_and_key(const Input& query, const Input& key, bool same_batch = true);

// Fills the fields about query and key that AttentionParams and ScoresParams share. Both have been checked.
template <class Params>
void add_query_and_key(Params& p, const Input& query, const Input& key) {
  p.dtype = float_dtype(query);
  p.batch = query.size[0];
  p.heads = query.size[1];
  p.queries = query.size[2];
  p.head_dim = query.size[3];
  p.kv_heads = key.size[1];
  p.keys = key.size[2];
  p.query = plain_view(query, p.dtype);
  p.key = plain_view(key, p.dtype);
}

// The shape of row statistics and the rows of tensors shaped as query or key: (batch, heads, queries) of the
// call, or one batch of all rows where they are packed.
int64_t query_batch(const AttentionParams& params);
int64_t query_rows(const AttentionParams& params);
// The batch of arrays of a number per query head and key: (batch, heads, keys), or one batch of all rows.
int64_t key_batch(const AttentionParams& params);
// Whether packed tensors have, or may have, rows behind the last sequence. Results have zeros there.
bool leaves_rows_out(const AttentionParams& params, Device device);

// The result of attention_weights, uninitialised.
Output allocate_weights(const AttentionParams& params, Device device);

// (batch, heads, queries) statistics in the accumulation type; a copy is made where they are not contiguous.
const void* row_statistics(TensorHandle& handle, Input& input, const AttentionParams& params);

// The same for (batch, heads, keys) numbers.
const void* numbers_per_key(TensorHandle& handle, Input& input, const AttentionParams& params);

// The same for a (2, batch, heads, queries) tensor of row_max and row_sum.
std::pair<const void*, const void*> pair_of_row_statistics(TensorHandle& handle, Input& input,
                                                           const AttentionParams& params);

// A number for each head of each batch element, or of all, in the accumulation type.
HeadScalars head_scalars(const char* name, const TensorHandle& handle, const AttentionParams& params,
                         const Input& query);
double finite_scale(double scale, DType dtype);
int64_t checked_query_offset(int64_t query_offset);

// float64, float32, bfloat16, float16 or bool, else a refusal.
DType mask_dtype(const Input& mask);
// The view of a mask that broadcasts to (batch, heads, queries, keys).
View mask_view(const Input& mask, int64_t batch, int64_t heads, int64_t queries, int64_t keys);

}  // namespace selfattn::ops
