// Reads the options off the stack, writes their part of the schema, and checks the arguments that the
// attention operators share.
#include "attention_arguments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_options.h"

namespace selfattn::ops {

namespace {

void read(Stack& stack, TensorHandle& field) { field = stack.optional_tensor(); }
void read(Stack& stack, double& field) { field = stack.number(); }
void read(Stack& stack, bool& field) { field = stack.flag(); }
void read(Stack& stack, int64_t& field) { field = stack.integer(); }
void read(Stack& stack, Name& field) { field = stack.name(); }
void read(Stack& stack, std::optional<Name>& field) { field = stack.optional_name(); }
void read(Stack& stack, std::optional<std::vector<int64_t>>& field) { field = stack.optional_integers(); }
void read(Stack& stack, std::optional<std::vector<double>>& field) { field = stack.optional_numbers(); }
void read(Stack& stack, std::vector<TensorHandle>& field) { field = stack.optional_tensors(); }

std::string declaration(const std::string& name, const TensorHandle&) { return "Tensor? " + name + "=None"; }
std::string declaration(const std::string& name, double value) {
  return "float " + name + "=" + std::to_string(value);
}
std::string declaration(const std::string& name, bool value) {
  return "bool " + name + (value ? "=True" : "=False");
}
std::string declaration(const std::string& name, int64_t value) {
  return "SymInt " + name + "=" + std::to_string(value);
}
std::string declaration(const std::string& name, const Name& value) {
  return "str " + name + "=\"" + value.text + "\"";
}
std::string declaration(const std::string& name, const std::optional<Name>&) {
  return "str? " + name + "=None";
}
std::string declaration(const std::string& name, const std::optional<std::vector<int64_t>>&) {
  return "SymInt[]? " + name + "=None";
}
std::string declaration(const std::string& name, const std::optional<std::vector<double>>&) {
  return "float[]? " + name + "=None";
}
std::string declaration(const std::string& name, const std::vector<TensorHandle>&) {
  return "Tensor[]? " + name + "=None";
}

}  // namespace

Options::Options(Stack& stack) {
  each(*this, [&stack](const char*, auto& field) { read(stack, field); });
  if (mask_shapes) own_masks = ops::own_masks(*mask_shapes);
  if (!captured.empty()) captured_tensors = ops::captured_tensors(captured);
}

std::string Options::schema() {
  std::string text;
  const Options defaults;
  each(defaults, [&text](const char* name, const auto& field) {
    text += (text.empty() ? "" : ", ") + declaration(name, field);
  });
  return text;
}

namespace {

// Sums of a query's index, its offset and a window stay far from overflow below these limits. A window of
// 2^42 is as good as an open one for any tensor and offset, so wider ones are cut; an offset is refused,
// since cutting it would change what it means together with a window.
constexpr int64_t kMaxOffset = int64_t{1} << 40;
constexpr int64_t kMaxWindow = int64_t{1} << 42;

int64_t checked_window(const char* name, int64_t window) {
  if (window < -1) refuse(name, " must be -1 (unbounded), 0 or positive, but it is ", window);
  return std::min(window, kMaxWindow);
}

// Checks where the dropout pattern of a call begins. Only for CPU tensors: reading a GPU's would wait for it.
void check_origin(const int64_t* seed) {
  for (int i = 1; i < 5; ++i) {
    if (seed[i] < 0 || seed[i] > 0xffffffffll) {
      refuse("dropout_seed has the position ", seed[i], ", which is not between 0 and 2^32 - 1");
    }
  }
  if (seed[4] % 4 != 0) refuse("dropout_seed has key ", seed[4], ", which is not a multiple of 4");
}

Dropout dropout(double probability, const TensorHandle& seed, const Input& query) {
  if (!(probability >= 0.0 && probability <= 1.0)) {
    refuse("dropout_p must lie between 0 and 1, but it is ", probability);
  }
  if (probability == 0.0) return {};
  constexpr const char* kWanted =
      "an int64 tensor of one element, or of five: the seed, and the numbers that the "
      "pattern gives to the first batch element, head, query and key";
  if (!seed) refuse("dropout_seed must be given where dropout_p > 0: ", kWanted);
  const Input input = inspect("dropout_seed", seed, query);
  int64_t count = 1;
  for (int64_t d = 0; d < input.rank; ++d) count *= input.size[d];
  const bool moved = count == 5 && input.rank == 1 && input.stride[0] == 1;
  if (input.dtype_code != dtype_codes().int64 || (count != 1 && !moved)) {
    refuse("dropout_seed must be ", kWanted, ", but it is ", dtype_text(input.dtype_code), " of shape ",
           shape_text(input.size, input.rank));
  }
  const auto* numbers = static_cast<const int64_t*>(input.data);
  if (moved && on_host(query.device)) check_origin(numbers);
  return {true, probability, numbers, moved};
}

Float32Precision float32_precision(const Name& name) {
  if (std::strcmp(name.text, "highest") == 0) return Float32Precision::kHighest;
  if (std::strcmp(name.text, "high") == 0) return Float32Precision::kHigh;
  if (std::strcmp(name.text, "medium") == 0) return Float32Precision::kMedium;
  refuse("float32_precision must be \"highest\", \"high\" or \"medium\", but it is \"", name.text, "\"");
}

// Refuses sizes whose products, which kernels form as indices, would overflow. Such tensors need not exist in
// memory: expanded dimensions cost none.
void check_index_range(const AttentionParams& p) {
  int64_t rows = p.batch;
  bool overflow = __builtin_mul_overflow(rows, p.heads, &rows);
  overflow = __builtin_mul_overflow(rows, p.queries, &rows) || overflow;
  overflow =
      overflow || rows > (int64_t{1} << 56) || p.keys > (int64_t{1} << 40) || p.queries > (int64_t{1} << 40);
  if (overflow) {
    refuse("query of ", p.batch, " batches, ", p.heads, " heads and ", p.queries, " rows against ", p.keys,
           " keys is larger than memory can address");
  }
}

struct Limits {
  double smallest, largest;  // of the normal numbers
};

Limits limits_of(DType dtype) {
  using Double = std::numeric_limits<double>;
  using Float = std::numeric_limits<float>;
  return accumulation_dtype(dtype) == DType::kFloat64 ? Limits{Double::min(), Double::max()}
                                                      : Limits{Float::min(), Float::max()};
}

// Returns a softcap that kernels can divide by and multiply with. A softcap near the largest number or beyond
// becomes 0 (off): it would change only scores so large that their softmax is 1 and zeros, and a quotient by
// it may be too small for the tanh of a GPU. A softcap below the smallest normal number becomes that number:
// both make all scores practically 0.
double usable_softcap(double softcap, DType dtype) {
  if (!(softcap >= 0.0 && std::isfinite(softcap))) {
    refuse("softcap must be 0 (off) or a positive finite number, but it is ", softcap);
  }
  const Limits limits = limits_of(dtype);
  return softcap == 0.0 || softcap > limits.largest / 1e8 ? 0.0 : std::max(softcap, limits.smallest);
}

}  // namespace

HeadScalars head_scalars(const char* name, const TensorHandle& handle, const AttentionParams& params,
                         const Input& query) {
  if (!handle) return {};
  const Input input = inspect(name, handle, query);
  check_dtype(input, accumulation_dtype(params.dtype));
  check_rank(input, 2);
  if ((input.size[0] != 1 && input.size[0] != params.batch) || input.size[1] != params.heads) {
    refuse(name, " must have the shape (", params.heads > 0 ? "1 or " : "", params.batch, ", ", params.heads,
           "), one number per head, but its shape is ", shape_text(input.size, input.rank));
  }
  if (!is_contiguous(input)) refuse(name, " must be contiguous");
  return {input.data, input.size[0] == 1 ? 0 : input.stride[0], input.stride[1]};
}

double finite_scale(double scale, DType dtype) {
  if (!std::isfinite(scale)) refuse("scale must be a finite number, but it is ", scale);
  if (std::abs(scale) > limits_of(dtype).largest) {
    refuse("scale must be finite in float32, in which ", name_of(dtype), " inputs are computed, but it is ",
           scale);
  }
  return scale;
}

int64_t checked_query_offset(int64_t query_offset) {
  if (query_offset > kMaxOffset || query_offset < -kMaxOffset) {
    refuse("query_offset must lie between -2^40 and 2^40, but it is ", query_offset);
  }
  return query_offset;
}

DType mask_dtype(const Input& mask) {
  return mask.dtype_code == dtype_codes().boolean ? DType::kBool : float_dtype(mask);
}

View mask_view(const Input& mask, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
  check_rank(mask, 4);
  const int64_t full[kMaxRank] = {batch, heads, queries, keys};
  for (int d = 0; d < kMaxRank; ++d) {
    if (mask.size[d] != 1 && mask.size[d] != full[d]) {
      refuse(mask.name, " of shape ", shape_text(mask.size, kMaxRank), " does not broadcast to ",
             shape_text(full, kMaxRank), " (batch, heads, queries, keys)");
    }
  }
  return broadcast_view(mask, mask_dtype(mask));
}

void check_query_and_key(const Input& query, const Input& key, bool same_batch) {
  check_rank(query, 4);
  check_rank(key, 4);
  check_dtype(key, float_dtype(query));
  if ((same_batch && key.size[0] != query.size[0]) || key.size[3] != query.size[3]) {
    refuse("key must agree with query in its batch size and last dimension, but query is ",
           shape_text(query.size, kMaxRank), " and key ", shape_text(key.size, kMaxRank));
  }
  if (key.size[1] == 0 ? query.size[1] != 0 : query.size[1] % key.size[1] != 0) {
    refuse("key has ", key.size[1], " heads, which does not divide the ", query.size[1], " heads of query");
  }
  check_last_stride(query);
  check_last_stride(key);
}

AttentionParams attention_params(const Input& query, const Input& key, const Input* value, double scale,
                                 const Options& options) {
  check_query_and_key(query, key, !options.has_lengths());
  AttentionParams p;
  add_query_and_key(p, query, key);
  p.float32_precision = float32_precision(options.float32_precision);
  if (value != nullptr) {
    check_rank(*value, 4);
    check_dtype(*value, p.dtype);
    if (value->size[0] != key.size[0] || value->size[1] != p.kv_heads || value->size[2] != key.size[2]) {
      refuse("value must agree with key in its first three dimensions, but key is ",
             shape_text(key.size, kMaxRank), " and value ", shape_text(value->size, kMaxRank));
    }
    check_last_stride(*value);
    p.value_dim = value->size[3];
    p.value = plain_view(*value, p.dtype);
  }
  p.rows_per_head = p.queries;
  p.keys_per_head = p.keys;
  if (options.has_lengths()) add_sequences(p, query, key, options);
  check_index_range(p);

  if (options.mask_shapes && !options.attn_mask) refuse("mask_shapes was given without attn_mask");
  if (options.attn_mask) {
    const Input mask = inspect("attn_mask", options.attn_mask, query);
    if (options.mask_shapes) {
      add_own_masks(p, mask, options, query.device);
    } else {
      p.mask = mask_view(mask, p.batch, p.heads, p.queries, p.keys);
    }
  }
  p.alibi_slopes = head_scalars("alibi_slopes", options.alibi_slopes, p, query);
  p.sinks = head_scalars("sinks", options.sinks, p, query);
  p.dropout = dropout(options.dropout_p, options.dropout_seed, query);
  p.scale = finite_scale(scale, p.dtype);
  p.softcap = usable_softcap(options.softcap, p.dtype);
  p.window_left = checked_window("window_left", options.window_left);
  p.window_right = checked_window("window_right", options.window_right);
  if (options.is_causal) p.window_right = 0;
  p.query_offset = checked_query_offset(options.query_offset);
  p.batch_invariant = options.batch_invariant;
  add_score_function(p, query, options);
  add_selection(p, query, options);
  return p;
}

Output allocate_weights(const AttentionParams& p, Device device) {
  return allocate("weights", {p.batch, p.heads, p.queries, p.keys}, p.dtype, device);
}

const void* row_statistics(TensorHandle& handle, Input& input, const AttentionParams& params) {
  check_dtype(input, accumulation_dtype(params.dtype));
  check_shape(input, {query_batch(params), params.heads, query_rows(params)});
  if (!is_contiguous(input)) make_contiguous(handle, input);
  return input.data;
}

const void* numbers_per_key(TensorHandle& handle, Input& input, const AttentionParams& params) {
  check_dtype(input, accumulation_dtype(params.dtype));
  check_shape(input, {key_batch(params), params.heads, params.keys_per_head});
  if (!is_contiguous(input)) make_contiguous(handle, input);
  return input.data;
}

std::pair<const void*, const void*> pair_of_row_statistics(TensorHandle& handle, Input& input,
                                                           const AttentionParams& p) {
  const DType dtype = accumulation_dtype(p.dtype);
  check_dtype(input, dtype);
  check_shape(input, {2, query_batch(p), p.heads, query_rows(p)});
  if (!is_contiguous(input)) make_contiguous(handle, input);
  const auto* row_max = static_cast<const char*>(input.data);
  return {row_max, row_max + query_batch(p) * p.heads * query_rows(p) * size_of(dtype)};
}

}  // namespace selfattn::ops
