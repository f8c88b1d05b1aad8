// The arguments of a kernel: raw pointers with shapes, strides and nullability, and options. They are plain
// data only. csrc/ops fills these structures after checking every argument; kernels trust them.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "score_function.h"
#include "selection.h"

namespace selfattn {

// A four-dimensional tensor seen by a kernel. Strides count elements and may be 0 (broadcast or expanded).
struct View {
  void* data = nullptr;  // nullable where the field that holds the view says so
  DType dtype = DType::kFloat32;
  int64_t stride[4] = {0, 0, 0, 0};  // batch, head, row, column

  SELFATTN_HOST_DEVICE int64_t offset(int64_t batch, int64_t head, int64_t row) const {
    return batch * stride[0] + head * stride[1] + row * stride[2];
  }
};

// A per-(batch, head) coefficient in the accumulation type; stride 0 along a broadcast dimension.
struct HeadScalars {
  const void* data = nullptr;  // nullable: the option is off
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
};

struct Dropout {
  bool enabled = false;
  double probability = 0.0;
  // A device pointer, so that a CUDA graph replays with the seed's current value. If the pattern has moved,
  // four numbers follow the seed: the pattern's indices of the first batch element, head, query and key of
  // the call.
  const int64_t* seed = nullptr;  // nullable unless enabled
  bool moved = false;
  int64_t first_batch = 0;  // the pattern's index of the first batch element
};

// The origin of a call within the pattern. Keys are counted in groups of four, as random numbers are.
struct DropoutOrigin {
  uint32_t batch = 0, head = 0, query = 0, key_group = 0;
};
inline SELFATTN_HOST_DEVICE DropoutOrigin dropout_origin(const Dropout& dropout) {
  DropoutOrigin origin;
  if (dropout.moved) {
    origin = {static_cast<uint32_t>(dropout.seed[1]), static_cast<uint32_t>(dropout.seed[2]),
              static_cast<uint32_t>(dropout.seed[3]), static_cast<uint32_t>(dropout.seed[4] >> 2)};
  }
  origin.batch += static_cast<uint32_t>(dropout.first_batch);
  return origin;
}

// The mask of one sequence in a buffer that holds those of all. It is contiguous, and a size is 1 if the mask
// is broadcast along it.
struct OwnMask {
  int64_t first = 0;
  int64_t size[3] = {0, 0, 0};  // heads, queries, keys
};

// The places of batch elements that have lengths of their own; see sequences.h. All pointers but the last are
// device pointers. All are nullable: what is missing is the same for every element.
struct Sequences {
  // [batch + 1]: element b has the rows starts[b] .. starts[b + 1] - 1 of a query (a key) without a batch
  // dimension; the view's stride of the batch is 0.
  const int64_t* query_starts = nullptr;
  const int64_t* key_starts = nullptr;
  const int64_t* key_lengths = nullptr;    // [batch]: how many of its keys exist
  const int64_t* query_offsets = nullptr;  // [batch]: instead of query_offset
  // The rows of packed tensors. On a GPU the numbers above are unchecked, so kernels limit them by these.
  int64_t query_rows = 0;
  int64_t key_rows = 0;
  // [batch], on the host, as only element_of() and launch_of() read it. If it is given, elements have masks
  // of their own, and the view of the mask (of its gradient) is that of a buffer of one dimension.
  const OwnMask* own_masks = nullptr;
  // Elements with fewer or more queries, or with fewer keys, are left to another kernel.
  int64_t least_queries = 0, least_keys = 0;
  int64_t most_queries = INT64_MAX;

  SELFATTN_HOST_DEVICE bool any() const {
    return query_starts != nullptr || key_starts != nullptr || key_lengths != nullptr ||
           query_offsets != nullptr;
  }
};

// Keys and values in pages that lie anywhere: key j of element b is row j % size of page table[b * stride + j
// / size]. The batch dimension of the views of key and value then counts pages.
struct Pages {
  const int32_t* table = nullptr;  // null if there are no pages
  int64_t stride = 0;
  int64_t size = 0;   // rows of a page
  int64_t count = 0;  // pages that exist
};

// The least exactness of products of float32 numbers: that of float32, of a sum of two bfloat16 numbers, or
// of one. A kernel may always be more exact than it is asked to be.
enum class Float32Precision : int8_t { kHighest, kHigh, kMedium };

struct AttentionParams {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;   // divides heads; query head h reads kv head h / (heads / kv_heads)
  int64_t queries = 0;    // L; if elements differ, of the longest
  int64_t keys = 0;       // S; likewise
  int64_t head_dim = 0;   // E
  int64_t value_dim = 0;  // Ev
  DType dtype = DType::kFloat32;
  Float32Precision float32_precision = Float32Precision::kHighest;

  View query;  // (batch, heads, queries, head_dim), last stride 1
  View key;    // (batch, kv_heads, keys, head_dim), last stride 1
  View value;  // (batch, kv_heads, keys, value_dim), last stride 1
  View mask;   // nullable; (batch, heads, queries, keys), stride 0 where broadcast; kBool or a float type

  HeadScalars alibi_slopes;  // nullable
  HeadScalars sinks;         // nullable
  Dropout dropout;

  double scale = 1.0;
  double softcap = 0.0;  // 0: off
  // Query i stands at position i + query_offset among the keys and sees keys in
  // [position - window_left, position + window_right]; -1 leaves a side open. Causal is window_right = 0.
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t query_offset = 0;
  // A row gets the same bits whichever other rows of its sequence the call has.
  bool batch_invariant = false;

  Sequences sequences;
  Pages pages;
  // The strides of heads in arrays of a number per query, and per key: queries and keys, or all rows of a
  // packed query or key.
  int64_t rows_per_head = 0;
  int64_t keys_per_head = 0;

  Selection selection;

  // It changes scores once they are scaled, capped and sloped; mask and windows come after it. It stays last:
  // a launch on a GPU writes the function's arguments behind these parameters.
  ScoreFunction function;

  // Returns the place of a query in arrays of row statistics.
  SELFATTN_HOST_DEVICE int64_t row(int64_t batch_index, int64_t head, int64_t query_index) const {
    return (batch_index * heads + head) * rows_per_head + query_index;
  }
  // Returns the place of a key in arrays of a number per query head and key.
  SELFATTN_HOST_DEVICE int64_t key_place(int64_t batch_index, int64_t head, int64_t key_index) const {
    return (batch_index * heads + head) * keys_per_head + key_index;
  }
  SELFATTN_HOST_DEVICE int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }
};

// The accumulation type is double for float64 inputs and float otherwise. Row statistics are contiguous
// (batch, heads, queries) arrays of it, or (heads, rows) if queries are packed: weights = exp(score -
// row_max) / row_sum.
struct ForwardOutputs {
  View out;                 // (batch, heads, queries, value_dim), last stride 1
  void* row_max = nullptr;  // -inf where a row sees nothing
  void* row_sum = nullptr;  // 0 where a row sees nothing
  // Nullable, laid out as out: what rounding to a 16-bit dtype took away, itself rounded to that dtype. With
  // it the backward knows rowsum(grad_out * out) to float accuracy, so that gradients carry no rounding but
  // their own.
  void* out_residual = nullptr;
  // Nullable, together; row statistics, see Note [Statistics of scores].
  void* row_top = nullptr;
  void* row_mean = nullptr;
};

struct WeightsOutputs {
  const void* row_max = nullptr;
  const void* row_sum = nullptr;
  View weights;  // (batch, heads, queries, keys), last stride 1; zeros on entry if elements differ in
                 // length
};

// Note [Statistics of scores]
// With s the scores of a row as the softmax takes them, m its row_max and p its weights before dropout, the
// forward gives row_top, the largest s of a visible key, and row_mean, the sum of p (s - m) over visible keys
// and the sink. row_max may be the sink, row_top is not. Both terms of the entropy, log(row_sum) - row_mean,
// are at least 0, so that nothing cancels; the mean of s and the entropy follow from these four numbers.
//
// Gradients of such numbers are gradients of scores: dS = P (dP - delta) becomes
//
//     dS_ij = P_ij (dP_ij + grad_mean_i (s_ij - m_i) + grad_keys_j - delta_i),
//
// where dP comes after dropout, and what the rows have in common is in delta, by grad_row. A sink has no dP:
// its dS is P_sink (grad_sink_i - delta_i). autograd/statistics.py derives the three arrays.

// Sums of the weights before dropout, from the forward's statistics. All arrays are of the accumulation type.
struct WeightSums {
  const void* row_max = nullptr;
  const void* row_sum = nullptr;
  // Either of_keys, the sum of each key's weights over all queries, or of_queries, the sum of a query's
  // weights times the numbers per_key. The other one is null.
  void* of_keys = nullptr;        // (batch, heads, keys), or (heads, rows) if keys are packed
  const void* per_key = nullptr;  // laid out as of_keys
  void* of_queries = nullptr;     // laid out as row_max
};

struct BackwardArguments {
  View grad_out;      // (batch, heads, queries, value_dim), last stride 1
  View out;           // the forward's result, any strides with last stride 1
  View out_residual;  // nullable; see ForwardOutputs
  const void* row_max = nullptr;
  const void* row_sum = nullptr;
  const void* grad_row = nullptr;  // nullable; laid out as row_max, added to rowsum(grad_out * out)
  View grad_weights;               // nullable; (batch, heads, queries, keys), any strides, the params' dtype
  // Nullable; see Note [Statistics of scores]. grad_keys is laid out as WeightSums::of_keys, the others as
  // row_max.
  const void* grad_mean = nullptr;
  const void* grad_sink = nullptr;
  const void* grad_keys = nullptr;

  View grad_query;  // shaped as query, dense, last stride 1
  View grad_key;
  View grad_value;
  View grad_mask;  // nullable; zeros on entry; strides are 0 where the mask was broadcast, for the kernel to
                   // sum over those dimensions, and otherwise those of a contiguous tensor
  // Nullable, laid out as row_max, of the accumulation type: per-row sums of d(score) * bias / slope, and of
  // d(sink). The caller sums them over batch and queries, in a fixed order.
  void* grad_slopes_rows = nullptr;
  void* grad_sinks_rows = nullptr;
  // Scratch of Kernel::backward_workspace() bytes, 64-byte aligned; nullable when that is 0.
  void* workspace = nullptr;
};

// Gradients of the tensors that the function of a call reads.
struct CapturedGradients {
  // [tensors of the function]: how many elements each gradient has, 0 where it is not wanted.
  const int64_t* sizes = nullptr;
  int64_t count = 0;       // number of tensors
  double* sums = nullptr;  // the wanted gradients, one behind the other; zeros on entry
  // Whether scores of different batch elements (heads, queries) read different elements of each tensor whose
  // gradient is wanted.
  bool exclusive_batch = false, exclusive_head = false, exclusive_query = false;

  // Returns the number of all sums.
  int64_t size() const {
    int64_t all = 0;
    for (int64_t i = 0; i < count; ++i) all += sizes[i];
    return all;
  }
};

struct ScoresParams {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kFloat32;
  double scale = 1.0;
  View query;       // last stride 1
  View key;         // last stride 1
  View scores;      // forward: written, contiguous; backward: the incoming gradient, last stride 1
  View grad_query;  // backward only
  View grad_key;    // backward only
};

struct SoftmaxParams {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  DType dtype = DType::kFloat32;
  double scale = 1.0;
  int64_t window_right = -1;  // 0: causal, -1: every key
  int64_t query_offset = 0;
  View scores;  // forward input; backward: the forward's result
  View mask;    // nullable; forward only
  View grad;    // backward only: gradient of the weights
  View result;  // contiguous: weights, or the gradient of the scores
};

// Returns the attention call with these scores, or these weights, as far as they tell.
inline AttentionParams attention_of(const ScoresParams& s) {
  AttentionParams p;
  p.batch = s.batch;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.queries = s.queries;
  p.keys = s.keys;
  p.head_dim = s.head_dim;
  p.dtype = s.dtype;
  p.scale = s.scale;
  p.query = s.query;
  p.key = s.key;
  return p;
}
inline AttentionParams attention_of(const SoftmaxParams& s) {
  AttentionParams p;
  p.batch = s.batch;
  p.heads = s.heads;
  p.kv_heads = s.heads;
  p.queries = s.queries;
  p.keys = s.keys;
  p.dtype = s.dtype;
  p.scale = s.scale;
  p.window_right = s.window_right;
  p.query_offset = s.query_offset;
  p.mask = s.mask;
  return p;
}

}  // namespace selfattn
