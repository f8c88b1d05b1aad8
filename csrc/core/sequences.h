// Batches whose elements differ in length and place: packed sequences, caches, pages.
//
// A kernel treats them no differently: it takes each element as a call of its own, of batch 1, so that the
// result of a sequence does not depend on the rest of the batch.
#pragma once

#include "attention_params.h"
#include "integers.h"

namespace selfattn {

// Rows of a packed tensor. Whatever the starts are, the rows lie within the tensor, and are no more than
// `longest`.
struct PackedRows {
  int64_t first;
  int64_t count;
};

inline SELFATTN_HOST_DEVICE PackedRows packed_rows(const int64_t* starts, int64_t index, int64_t rows,
                                                   int64_t longest) {
  const int64_t first = limited(starts[index], 0, rows);
  const int64_t end = limited(starts[index + 1], first, rows);
  return {first, limited(end - first, 0, longest)};
}

inline SELFATTN_HOST_DEVICE PackedRows queries_of(const AttentionParams& p, int64_t b) {
  if (p.sequences.query_starts == nullptr) return {0, p.queries};
  return packed_rows(p.sequences.query_starts, b, p.sequences.query_rows, p.queries);
}

inline SELFATTN_HOST_DEVICE PackedRows keys_of(const AttentionParams& p, int64_t b) {
  PackedRows keys{0, p.keys};
  if (p.sequences.key_starts != nullptr) {
    keys = packed_rows(p.sequences.key_starts, b, p.sequences.key_rows, p.keys);
  }
  if (p.sequences.key_lengths != nullptr) keys.count = limited(p.sequences.key_lengths[b], 0, keys.count);
  return keys;
}

// Returns how many scores a call computes, hidden ones among them.
inline double count_of_scores(const AttentionParams& p) {
  const Selection& s = p.selection;
  const auto seen = [&](int64_t keys) {
    const bool fewer = s.lists != nullptr && s.longest < divide_up(keys, s.key_size);
    return static_cast<double>(fewer ? s.longest * s.key_size : keys);
  };
  if (!p.sequences.any()) return static_cast<double>(p.batch * p.heads * p.queries) * seen(p.keys);
  double pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    pairs += static_cast<double>(queries_of(p, b).count) * seen(keys_of(p, b).count);
  }
  return pairs * static_cast<double>(p.heads);
}

// moved() skips elements, and element_of() returns element b of a tensor whose rows are those of the queries,
// or of the keys. A null pointer stays null.
inline SELFATTN_HOST_DEVICE void* moved(void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + elements * size_of(dtype);
}
inline SELFATTN_HOST_DEVICE const void* moved(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
inline SELFATTN_HOST_DEVICE View element_of(const View& view, int64_t b, bool packed, int64_t first_row) {
  View element = view;
  element.data = moved(view.data, packed ? first_row * view.stride[2] : b * view.stride[0], view.dtype);
  return element;
}
inline SELFATTN_HOST_DEVICE HeadScalars element_of(const HeadScalars& scalars, int64_t b, DType dtype) {
  HeadScalars element = scalars;
  element.data = moved(scalars.data, b * scalars.batch_stride, dtype);
  return element;
}

// Returns the function of element b, whose positions count from its own first query and key.
inline SELFATTN_HOST_DEVICE ScoreFunction element_of(const ScoreFunction& function, int64_t b) {
  ScoreFunction element = function;
  element.first_batch = function.first_batch + b;
  if (function.map.blocks != nullptr) element.map.blocks = function.map.blocks + b * function.map.stride[0];
  return element;
}

// Returns the lists of element b, whose rows are those of the queries.
inline SELFATTN_HOST_DEVICE Selection element_of(const Selection& selection, int64_t b, bool packed,
                                                 PackedRows queries) {
  Selection element = selection;
  if (selection.lists == nullptr) return element;
  element.lists += packed ? queries.first * selection.longest : b * selection.stride[0];
  if (packed) element.rows = queries.count;
  return element;
}

// Returns element b of a mask or of its gradient. Each keeps the buffer's stride of the batch, which is not 0
// for gradients, as sequences do not share them.
inline SELFATTN_HOST_DEVICE View mask_of(const View& view, const AttentionParams& p, int64_t b) {
  if (p.sequences.own_masks == nullptr) return element_of(view, b, false, 0);
  const OwnMask& own = p.sequences.own_masks[b];
  View mask = view;
  mask.data = moved(view.data, own.first, view.dtype);
  int64_t stride = 1;
  for (int d = 2; d >= 0; --d) {
    mask.stride[d + 1] = own.size[d] == 1 ? 0 : stride;
    stride *= own.size[d];
  }
  return mask;
}

inline SELFATTN_HOST_DEVICE DType statistics_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Returns where the row statistics of element b begin.
inline SELFATTN_HOST_DEVICE int64_t first_row_of(const AttentionParams& p, int64_t b) {
  return p.sequences.query_starts != nullptr ? queries_of(p, b).first : p.row(b, 0, 0);
}

// Returns where the numbers per key of element b begin.
inline SELFATTN_HOST_DEVICE int64_t first_key_of(const AttentionParams& p, int64_t b) {
  return p.sequences.key_starts != nullptr ? keys_of(p, b).first : p.key_place(b, 0, 0);
}

// Returns batch element b as a call of its own.
inline SELFATTN_HOST_DEVICE AttentionParams element_of(const AttentionParams& p, int64_t b) {
  AttentionParams element = p;
  const PackedRows queries = queries_of(p, b), keys = keys_of(p, b);
  const bool packed_queries = p.sequences.query_starts != nullptr;
  const bool packed_keys = p.sequences.key_starts != nullptr;
  element.batch = 1;
  element.queries = queries.count;
  element.keys = keys.count;
  element.query = element_of(p.query, b, packed_queries, queries.first);
  if (p.pages.table != nullptr) {
    element.pages.table = p.pages.table + b * p.pages.stride;
  } else {
    element.key = element_of(p.key, b, packed_keys, keys.first);
    element.value = element_of(p.value, b, packed_keys, keys.first);
  }
  element.mask = mask_of(p.mask, p, b);
  element.alibi_slopes = element_of(p.alibi_slopes, b, statistics_dtype(p.dtype));
  element.sinks = element_of(p.sinks, b, statistics_dtype(p.dtype));
  element.dropout.first_batch = p.dropout.first_batch + b;
  element.function = element_of(p.function, b);
  element.selection = element_of(p.selection, b, packed_queries, queries);
  if (p.sequences.query_offsets != nullptr) element.query_offset = p.sequences.query_offsets[b];
  element.sequences = Sequences{};
  return element;
}

inline SELFATTN_HOST_DEVICE ForwardOutputs element_of(const ForwardOutputs& outputs, const AttentionParams& p,
                                                      int64_t b) {
  ForwardOutputs element = outputs;
  const bool packed = p.sequences.query_starts != nullptr;
  const int64_t first = queries_of(p, b).first, row = first_row_of(p, b);
  element.out = element_of(outputs.out, b, packed, first);
  element.out_residual = moved(outputs.out_residual,
                               packed ? first * outputs.out.stride[2] : b * outputs.out.stride[0], p.dtype);
  element.row_max = moved(outputs.row_max, row, statistics_dtype(p.dtype));
  element.row_sum = moved(outputs.row_sum, row, statistics_dtype(p.dtype));
  element.row_top = moved(outputs.row_top, row, statistics_dtype(p.dtype));
  element.row_mean = moved(outputs.row_mean, row, statistics_dtype(p.dtype));
  return element;
}

inline SELFATTN_HOST_DEVICE WeightsOutputs element_of(const WeightsOutputs& outputs, const AttentionParams& p,
                                                      int64_t b) {
  WeightsOutputs element = outputs;
  const int64_t row = first_row_of(p, b);
  element.row_max = moved(outputs.row_max, row, statistics_dtype(p.dtype));
  element.row_sum = moved(outputs.row_sum, row, statistics_dtype(p.dtype));
  element.weights = element_of(outputs.weights, b, false, 0);
  return element;
}

inline SELFATTN_HOST_DEVICE WeightSums element_of(const WeightSums& sums, const AttentionParams& p,
                                                  int64_t b) {
  WeightSums element = sums;
  const int64_t row = first_row_of(p, b), key = first_key_of(p, b);
  const DType statistics = statistics_dtype(p.dtype);
  element.row_max = moved(sums.row_max, row, statistics);
  element.row_sum = moved(sums.row_sum, row, statistics);
  element.of_keys = moved(sums.of_keys, key, statistics);
  element.per_key = moved(sums.per_key, key, statistics);
  element.of_queries = moved(sums.of_queries, row, statistics);
  return element;
}

// The workspace stays that of the whole call: the kernel divides it.
inline SELFATTN_HOST_DEVICE BackwardArguments element_of(const BackwardArguments& a, const AttentionParams& p,
                                                         int64_t b) {
  BackwardArguments element = a;
  const bool packed_queries = p.sequences.query_starts != nullptr;
  const bool packed_keys = p.sequences.key_starts != nullptr;
  const int64_t query = queries_of(p, b).first, key = keys_of(p, b).first, row = first_row_of(p, b);
  const DType statistics = statistics_dtype(p.dtype);
  element.grad_out = element_of(a.grad_out, b, packed_queries, query);
  element.out = element_of(a.out, b, packed_queries, query);
  element.out_residual = element_of(a.out_residual, b, packed_queries, query);
  element.row_max = moved(a.row_max, row, statistics);
  element.row_sum = moved(a.row_sum, row, statistics);
  element.grad_row = moved(a.grad_row, row, statistics);
  element.grad_weights = element_of(a.grad_weights, b, false, 0);
  element.grad_mean = moved(a.grad_mean, row, statistics);
  element.grad_sink = moved(a.grad_sink, row, statistics);
  element.grad_keys = moved(a.grad_keys, first_key_of(p, b), statistics);
  element.grad_query = element_of(a.grad_query, b, packed_queries, query);
  element.grad_key = element_of(a.grad_key, b, packed_keys, key);
  element.grad_value = element_of(a.grad_value, b, packed_keys, key);
  element.grad_mask = mask_of(a.grad_mask, p, b);
  element.grad_slopes_rows = moved(a.grad_slopes_rows, row, statistics);
  element.grad_sinks_rows = moved(a.grad_sinks_rows, row, statistics);
  return element;
}

// Returns element b of a call with masks of their own, if only the device knows the lengths: a batch of one
// that is still packed. The mask's size limits queries and keys, so that no length makes a kernel read beyond
// it.
inline AttentionParams launch_of(const AttentionParams& p, int64_t b) {
  AttentionParams one = p;
  const int64_t* size = p.sequences.own_masks[b].size;
  one.batch = 1;
  if (size[1] != 1 && size[1] < p.queries) one.queries = size[1];
  if (size[2] != 1 && size[2] < p.keys) one.keys = size[2];
  one.mask = mask_of(p.mask, p, b);
  one.alibi_slopes = element_of(p.alibi_slopes, b, statistics_dtype(p.dtype));
  one.sinks = element_of(p.sinks, b, statistics_dtype(p.dtype));
  one.dropout.first_batch = p.dropout.first_batch + b;
  one.function = element_of(p.function, b);
  one.sequences.query_starts = p.sequences.query_starts + b;
  one.sequences.key_starts = p.sequences.key_starts + b;
  if (p.sequences.key_lengths != nullptr) one.sequences.key_lengths = p.sequences.key_lengths + b;
  if (p.sequences.query_offsets != nullptr) one.sequences.query_offsets = p.sequences.query_offsets + b;
  one.sequences.own_masks = nullptr;
  return one;
}

// Packed results lie where the starts say.
inline ForwardOutputs launch_of(const ForwardOutputs& outputs, const AttentionParams&, int64_t) {
  return outputs;
}

inline WeightsOutputs launch_of(const WeightsOutputs& outputs, const AttentionParams&, int64_t b) {
  WeightsOutputs one = outputs;
  one.weights = element_of(outputs.weights, b, false, 0);
  return one;
}

inline WeightSums launch_of(const WeightSums& sums, const AttentionParams&, int64_t) { return sums; }

inline BackwardArguments launch_of(const BackwardArguments& a, const AttentionParams& p, int64_t b) {
  BackwardArguments one = a;
  one.grad_weights = element_of(a.grad_weights, b, false, 0);
  one.grad_mask = mask_of(a.grad_mask, p, b);
  return one;
}

// Calls function(params, results) for the whole call, or for one sequence after the other if each has a mask
// of its own.
template <class Results, class Function>
void for_each_launch(const AttentionParams& p, const Results& results, const Function& function) {
  if (p.sequences.own_masks == nullptr) return function(p, results);
  for (int64_t b = 0; b < p.batch; ++b) {
    const AttentionParams one = launch_of(p, b);
    if (one.queries > 0) function(one, launch_of(results, p, b));
  }
}

// Returns where the rows of a page begin, given its place in the table. Page numbers are limited as starts
// are.
inline SELFATTN_HOST_DEVICE int64_t offset_of_page(const View& view, const Pages& pages, int64_t batch,
                                                   int64_t kv_head, int64_t index) {
  return view.offset(limited(pages.table[batch * pages.stride + index], 0, pages.count - 1), kv_head, 0);
}

// Returns where a row of keys or values lies.
inline SELFATTN_HOST_DEVICE int64_t offset_of_key(const View& view, const Pages& pages, int64_t batch,
                                                  int64_t kv_head, int64_t key) {
  if (pages.table == nullptr) return view.offset(batch, kv_head, key);
  return offset_of_page(view, pages, batch, kv_head, key / pages.size) + key % pages.size * view.stride[2];
}

}  // namespace selfattn
