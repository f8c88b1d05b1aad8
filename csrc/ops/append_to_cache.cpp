// append_to_cache, which writes new keys and values behind those that a cache holds; attention_with_cache;
// and the checks of their arguments.
#include "append_arguments.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "attention_forward.h"
#include "engine.h"
#include "operators.h"
#include "shared_memory.h"

namespace selfattn::ops {

namespace {

// An input that is written to. Its mutable data is asked for first, so that a tensor that shares memory only
// until it is written (copy on write) gets memory of its own.
Input inspect_cache(const char* name, const TensorHandle& handle, const Input& first) {
  void* data = nullptr;
  if (torch_get_mutable_data_ptr(handle.get(), &data) != TORCH_SUCCESS)
    refuse(name, " must be a dense tensor");
  const Input input = inspect(name, handle, first);
  check_rank(input, 4);
  check_last_stride(input);
  if (overlaps_itself(input)) {
    refuse(name, " is written to, but parts of it are the same memory, as in expanded tensors; clone() it");
  }
  return input;
}

void check_rows(const Input& input, DType dtype) {
  check_rank(input, 4);
  check_dtype(input, dtype);
  check_last_stride(input);
}

// If values are the same columns of the keys in the tensors and in the caches, both writes store the same
// numbers there.
void check_caches_apart(const WrittenCaches& caches, const Input& key, const Input& value) {
  if (!may_share(caches.key, caches.value)) return;
  int64_t cached = 0, given = 0;
  if (is_columns_of(caches.value, caches.key, &cached) && is_columns_of(value, key, &given) &&
      cached == given) {
    return;
  }
  refuse(
      "key_cache and value_cache are the same memory in part, and both are written to: give each its own, "
      "or, where value is features of key, the same features of key_cache and key as views of these");
}

Input inspect_numbers(const char* name, TensorHandle& handle, const WrittenCaches& caches,
                      int32_t dtype_code) {
  Input input = inspect(name, handle, caches.key);
  caches.keep_apart(handle, input);
  if (input.dtype_code != dtype_code) {
    refuse(name, " must be ", dtype_text(dtype_code), ", but it is ", dtype_text(input.dtype_code));
  }
  return input;
}

// The rows of a page that a sequence writes.
struct Written {
  int64_t page, first, end, sequence;
};

void check_pages(const AppendParams& a) {
  std::vector<Written> written;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t begin = a.first_position(b), end = begin + a.rows_of(b);
    for (int64_t position = begin; position < end;) {
      const int64_t column = position / a.pages.size, first = position % a.pages.size;
      const int64_t count = std::min(end - position, a.pages.size - first);
      const int64_t page = a.pages.table[b * a.pages.stride + column];
      if (page < 0 || page >= a.pages.count) {
        refuse("block_table[", b, ", ", column, "] is ", page, ", where new keys go, but there are ",
               a.pages.count, " pages");
      }
      written.push_back({page, first, first + count, b});
      position += count;
    }
  }
  std::sort(written.begin(), written.end(), [](const Written& left, const Written& right) {
    return std::tie(left.page, left.first) < std::tie(right.page, right.first);
  });
  for (size_t n = 1; n < written.size(); ++n) {
    const Written &one = written[n - 1], &other = written[n];
    if (one.page == other.page && other.first < one.end) {
      refuse("block_table makes sequences ", std::min(one.sequence, other.sequence), " and ",
             std::max(one.sequence, other.sequence), " write to the same rows of page ", one.page);
    }
  }
}

void check_values(const AppendParams& a) {
  int64_t next = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.row_starts != nullptr) {
      if (a.row_starts[b] != next || a.row_starts[b + 1] < next || a.row_starts[b + 1] > a.rows) {
        refuse("cu_seqlens must begin with 0, never decrease, and not pass the ", a.rows,
               " rows of key, but element ", b, " is ", a.row_starts[b], " and the next ",
               a.row_starts[b + 1]);
      }
      next = a.row_starts[b + 1];
    }
    const int64_t rows = a.rows_of(b);
    // A negative length appears in the message as it is, because subtracting the new rows could overflow.
    const int64_t begin = a.lengths[b] < 0 ? a.lengths[b] : a.first_position(b);
    if (begin < 0 || begin > a.capacity) {
      refuse("sequence ", b, " of the cache has the length ", begin, " before its ", rows,
             " new keys, which does not lie between 0 and the capacity ", a.capacity);
    }
    if (rows > a.capacity - begin) {
      refuse("sequence ", b, " of the cache is full: it holds ", begin, " keys of ", a.capacity, ", and ",
             rows, " more are given");
    }
  }
  if (a.pages.table != nullptr) check_pages(a);
}

}  // namespace

void WrittenCaches::keep_apart(TensorHandle& handle, Input& input) const {
  if (may_share(key, input) || may_share(value, input)) make_copy(handle, input);
}

void WrittenCaches::keep_apart(const char* name, TensorHandle& handle) const {
  if (!handle) return;
  Input input = inspect(name, handle);
  keep_apart(handle, input);
}

Append::Append(const AppendTensors& tensors, bool lengths_after) {
  const Input first = inspect("key", tensors.key);
  device = first.device;
  // This may give the caches memory of their own (copy on write), so the caches are inspected before key and
  // value, which may be views of them.
  const Input& key_cache = caches.key = inspect_cache("key_cache", tensors.key_cache, first);
  const Input& value_cache = caches.value = inspect_cache("value_cache", tensors.value_cache, first);
  Input key = inspect("key", tensors.key), value = inspect("value", tensors.value, first);

  AppendParams& a = rows;
  a.dtype = float_dtype(key_cache);
  check_dtype(value_cache, a.dtype);
  check_rows(key, a.dtype);
  check_rows(value, a.dtype);
  check_caches_apart(caches, key, value);
  caches.keep_apart(tensors.key, key);
  caches.keep_apart(tensors.value, value);
  const Input seqlens = inspect_numbers("seqlens", tensors.seqlens, caches, dtype_codes().int64);

  check_rank(seqlens, 1);
  if (!is_contiguous(seqlens)) refuse("seqlens must be contiguous");
  a.batch = seqlens.size[0];
  a.kv_heads = key_cache.size[1];
  a.rows = key.size[2];
  a.head_dim = key_cache.size[3];
  a.value_dim = value_cache.size[3];
  a.lengths = static_cast<const int64_t*>(seqlens.data);
  a.lengths_after = lengths_after;
  a.capacity = key_cache.size[2];
  check_shape(value_cache, {key_cache.size[0], a.kv_heads, a.capacity, a.value_dim});
  if (tensors.block_table) {
    const Input table = inspect_numbers("block_table", tensors.block_table, caches, dtype_codes().int32);
    check_rank(table, 2);
    check_last_stride(table);
    if (table.size[0] != a.batch) {
      refuse("block_table must have a row for each of the ", a.batch, " sequences, but its shape is ",
             shape_text(table.size, 2));
    }
    a.pages.table = static_cast<const int32_t*>(table.data);
    a.pages.stride = table.stride[0];
    a.pages.size = key_cache.size[2];
    a.pages.count = key_cache.size[0];
    if (a.pages.count == 0 || a.pages.size == 0) {
      a.capacity = 0;
    } else if (__builtin_mul_overflow(table.size[1], a.pages.size, &a.capacity)) {
      refuse("block_table names more rows than memory can address");
    }
  } else if (key_cache.size[0] != a.batch) {
    refuse("seqlens must have one length for each of the ", key_cache.size[0],
           " sequences of the cache, but has ", a.batch);
  }
  int64_t key_batch = a.batch;
  if (tensors.cu_seqlens) {
    const Input starts = inspect_numbers("cu_seqlens", tensors.cu_seqlens, caches, dtype_codes().int64);
    check_shape(starts, {a.batch + 1});
    if (!is_contiguous(starts)) refuse("cu_seqlens must be contiguous");
    a.row_starts = static_cast<const int64_t*>(starts.data);
    key_batch = 1;
  }
  check_shape(key, {key_batch, a.kv_heads, a.rows, a.head_dim});
  check_shape(value, {key_batch, a.kv_heads, a.rows, a.value_dim});
  a.key = plain_view(key, a.dtype);
  a.value = plain_view(value, a.dtype);
  a.key_cache = plain_view(key_cache, a.dtype);
  a.value_cache = plain_view(value_cache, a.dtype);
  if (device.type == aoti_torch_device_type_cpu()) check_values(a);
}

void Append::run() const {
  if (rows.batch * rows.kv_heads * rows.rows > 0) engine_of(device).append(rows, device);
}

void append_to_cache(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle key_cache = stack.tensor();
  const TensorHandle value_cache = stack.tensor();
  TensorHandle key = stack.tensor();
  TensorHandle value = stack.tensor();
  TensorHandle seqlens = stack.tensor();
  TensorHandle cu_seqlens = stack.optional_tensor();
  TensorHandle block_table = stack.optional_tensor();

  const AppendTensors tensors = {key_cache, value_cache, key, value, seqlens, cu_seqlens, block_table};
  Append(tensors, false).run();
}

namespace {

void attend_with_cache(StableIValue* values, bool with_statistics) {
  Stack stack(values);
  TensorHandle query = stack.tensor();
  const TensorHandle key_cache = stack.tensor();
  const TensorHandle value_cache = stack.tensor();
  TensorHandle key = stack.tensor();
  TensorHandle value = stack.tensor();
  const double scale = stack.number();
  const bool need_weights = stack.flag();
  Options options(stack);

  if (!options.seqlens_k) refuse("seqlens_k must be given: the lengths of the cache with the new keys");
  // The append comes first, because it may move the caches to memory of their own.
  const AppendTensors tensors = {
      key_cache, value_cache, key, value, options.seqlens_k, options.cu_seqlens_q, options.block_table};
  const Append append(tensors, true);
  append.caches.keep_apart("query", query);
  append.caches.keep_apart("attn_mask", options.attn_mask);
  append.caches.keep_apart("alibi_slopes", options.alibi_slopes);
  append.caches.keep_apart("sinks", options.sinks);
  append.caches.keep_apart("query_offsets", options.query_offsets);
  const ForwardCall call(query, key_cache, value_cache, scale, options);
  Output out = call.allocate_out("out");
  Output row_max = call.allocate_statistic("row_max");
  Output row_sum = call.allocate_statistic("row_sum");
  Output row_top, row_mean;
  if (with_statistics) {
    row_top = call.allocate_statistic("row_top");
    row_mean = call.allocate_statistic("row_mean");
  }
  if (need_weights) call.require_weights();
  append.run();
  run_forward(call, options.kernel_name, out,
              {{}, row_max.data, row_sum.data, nullptr, row_top.data, row_mean.data});
  if (with_statistics) {
    stack.put(out.handle, row_max.handle, row_sum.handle, row_top.handle, row_mean.handle);
  } else {
    stack.put(out.handle, row_max.handle, row_sum.handle);
  }
}

}  // namespace

// append_to_cache and attention_forward as one step of a decoder. Everything that either of them could refuse
// is refused before the first write, so that a wrong argument leaves the cache as it was. A step also costs
// only one call.
void attention_with_cache(StableIValue* values, uint64_t, uint64_t) { attend_with_cache(values, false); }

// The same with attention_statistics.
void statistics_with_cache(StableIValue* values, uint64_t, uint64_t) { attend_with_cache(values, true); }

}  // namespace selfattn::ops
