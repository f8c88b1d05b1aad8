// The arguments about batches whose elements have lengths and places of their own, checked.
#include "../core/sequences.h"
#include "attention_arguments.h"

namespace selfattn::ops {

namespace {

const int64_t* integers(const Input& input) {
  if (input.dtype_code != dtype_codes().int64) {
    refuse(input.name, " must be an int64 tensor, but it is ", dtype_text(input.dtype_code));
  }
  if (!is_contiguous(input)) refuse(input.name, " must be contiguous");
  return static_cast<const int64_t*>(input.data);
}

// Reads a contiguous vector of int64, which must have `count` elements unless that is negative.
const int64_t* integers(const char* name, const TensorHandle& handle, const Input& query, int64_t count,
                        int64_t* found = nullptr) {
  const Input input = inspect(name, handle, query);
  check_rank(input, 1);
  const int64_t* numbers = integers(input);
  if (count >= 0 && input.size[0] != count) {
    refuse(name, " must have ", count, " elements, but it has ", input.size[0]);
  }
  if (found != nullptr) *found = input.size[0];
  return numbers;
}

// Checks where sequences start, and where the last one ends.
void check_starts(const char* name, const int64_t* start, int64_t count, const Input& query, int64_t rows,
                  int64_t longest, int64_t* batch) {
  if (count == 0)
    refuse(name, " must hold the start of each sequence and the end of the last, but it is empty");
  if (*batch >= 0 && count - 1 != *batch) {
    refuse(name, " describes ", count - 1, " sequences, but there are ", *batch);
  }
  *batch = count - 1;
  if (longest < 0) refuse("the longest sequence of ", name, " cannot have ", longest, " rows");
  if (!on_host(query.device)) return;
  if (start[0] != 0) refuse(name, " must start with 0, but it starts with ", start[0]);
  for (int64_t b = 0; b < *batch; ++b) {
    if (start[b + 1] < start[b]) {
      refuse(name, " must not decrease, but ", start[b], " is followed by ", start[b + 1]);
    }
    const int64_t length = start[b + 1] - start[b];  // neither is negative, so it cannot overflow
    if (length > longest) {
      refuse(name, " has a sequence of ", length, " rows, longer than the longest, which was given as ",
             longest);
    }
  }
  if (start[*batch] > rows) {
    refuse(name, " ends at ", start[*batch], ", beyond the ", rows, " rows of its tensor");
  }
}

void check_range(const char* name, const int64_t* numbers, int64_t count, int64_t least, int64_t most) {
  for (int64_t b = 0; b < count; ++b) {
    if (numbers[b] < least || numbers[b] > most) {
      refuse(name, " must lie between ", least, " and ", most, ", but element ", b, " is ", numbers[b]);
    }
  }
}

// A packed tensor has no batch, so its first dimension must be 1.
void check_packed(const Input& input, const char* offsets) {
  if (input.size[0] != 1) {
    refuse(input.name, " must be (1, heads, rows, dim) where ", offsets, " is given, but its shape is ",
           shape_text(input.size, input.rank));
  }
}

void check_pages(const Pages& pages, const int64_t* lengths, int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n * pages.size < lengths[b]; ++n) {
      const int32_t page = pages.table[b * pages.stride + n];
      if (page < 0 || page >= pages.count) {
        refuse("block_table names page ", page, " for element ", b, ", but there are ", pages.count,
               " pages");
      }
    }
  }
}

}  // namespace

void add_sequences(AttentionParams& p, const Input& query, const Input& key, const Options& options) {
  Sequences& s = p.sequences;
  int64_t batch = -1, count = 0, key_count = 0;
  if (options.offsets) {
    const Input both = inspect("offsets", options.offsets, query);
    check_rank(both, 2);
    check_shape(both, {2, both.size[1]});
    count = key_count = both.size[1];
    s.query_starts = integers(both);
    s.key_starts = s.query_starts + count;
  }
  if (options.cu_seqlens_q) {
    check_packed(query, "cu_seqlens_q");
    s.query_starts = integers("cu_seqlens_q", options.cu_seqlens_q, query, -1, &count);
  }
  if (options.cu_seqlens_k) {
    check_packed(key, "cu_seqlens_k");
    s.key_starts = integers("cu_seqlens_k", options.cu_seqlens_k, query, -1, &key_count);
  }
  if (options.offsets || options.cu_seqlens_q) {
    s.query_rows = query.size[2];
    check_starts("cu_seqlens_q", s.query_starts, count, query, s.query_rows, options.max_seqlen_q, &batch);
    p.queries = options.max_seqlen_q;
    p.query.stride[0] = 0;
  } else {
    batch = query.size[0];
  }
  if (options.offsets || options.cu_seqlens_k) {
    s.key_rows = key.size[2];
    check_starts("cu_seqlens_k", s.key_starts, key_count, query, s.key_rows, options.max_seqlen_k, &batch);
    p.keys = options.max_seqlen_k;
    p.key.stride[0] = p.value.stride[0] = 0;
  } else if (!options.block_table && key.size[0] != batch) {
    refuse("key must have a batch of ", batch, ", but its shape is ", shape_text(key.size, key.rank));
  }
  p.batch = batch;
  if (options.block_table) {
    if (options.cu_seqlens_k) refuse("keys are either packed (cu_seqlens_k) or in pages (block_table)");
    if (!options.seqlens_k) refuse("block_table needs seqlens_k");
    const Input table = inspect("block_table", options.block_table, query);
    check_rank(table, 2);
    if (table.dtype_code != dtype_codes().int32) {
      refuse("block_table must be an int32 tensor, but it is ", dtype_text(table.dtype_code));
    }
    if (table.size[0] != batch) {
      refuse("block_table must have ", batch, " rows, but its shape is ", shape_text(table.size, 2));
    }
    check_last_stride(table);
    if (key.size[2] == 0) refuse("pages must have at least one row, but key is ", shape_text(key.size, 4));
    p.pages.table = static_cast<const int32_t*>(table.data);
    p.pages.stride = table.stride[0];
    p.pages.size = key.size[2];
    p.pages.count = key.size[0];
    if (__builtin_mul_overflow(table.size[1], p.pages.size, &p.keys)) refuse("block_table is too wide");
    if (p.pages.count == 0) p.keys = 0;
  }
  if (options.seqlens_k) {
    s.key_lengths = integers("seqlens_k", options.seqlens_k, query, batch);
    if (on_host(query.device)) check_range("seqlens_k", s.key_lengths, batch, 0, p.keys);
    if (on_host(query.device) && p.pages.table != nullptr) check_pages(p.pages, s.key_lengths, batch);
  }
  if (options.query_offsets) {
    s.query_offsets = integers("query_offsets", options.query_offsets, query, batch);
    constexpr int64_t kMost = int64_t{1} << 40;
    if (on_host(query.device)) check_range("query_offsets", s.query_offsets, batch, -kMost, kMost);
  }
  p.rows_per_head = query_rows(p);
  p.keys_per_head = s.key_starts != nullptr ? s.key_rows : p.keys;
}

std::vector<OwnMask> own_masks(const std::vector<int64_t>& shapes) {
  if (shapes.size() % 3 != 0) {
    refuse("mask_shapes must hold heads, queries and keys of each mask, but it has ", shapes.size(),
           " numbers");
  }
  std::vector<OwnMask> masks(shapes.size() / 3);
  int64_t end = 0;
  for (size_t b = 0; b < masks.size(); ++b) {
    masks[b].first = end;
    int64_t count = 1;
    bool overflow = false;
    for (int d = 0; d < 3; ++d) {
      const int64_t size = masks[b].size[d] = shapes[3 * b + d];
      if (size < 0) refuse("mask_shapes must not be negative, but mask ", b, " has ", size);
      overflow = __builtin_mul_overflow(count, size, &count) || overflow;
    }
    overflow = __builtin_add_overflow(end, count, &end) || overflow;
    if (overflow) refuse("mask_shapes has more elements than memory can address");
  }
  return masks;
}

void add_own_masks(AttentionParams& p, const Input& mask, const Options& options, Device device) {
  const std::vector<OwnMask>& masks = options.own_masks;
  if (!options.cu_seqlens_q || !options.cu_seqlens_k) {
    refuse("mask_shapes is for packed queries and keys (cu_seqlens_q, cu_seqlens_k)");
  }
  if (static_cast<int64_t>(masks.size()) != p.batch) {
    refuse("mask_shapes describes ", masks.size(), " masks, but there are ", p.batch, " sequences");
  }
  int64_t end = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t* size = masks[b].size;
    end = masks[b].first + size[0] * size[1] * size[2];
    // Lengths on a GPU are not read here. launch_of() limits a launch to the mask's queries and keys.
    const bool known = on_host(device);
    const int64_t full[3] = {p.heads, known ? queries_of(p, b).count : size[1],
                             known ? keys_of(p, b).count : size[2]};
    for (int d = 0; d < 3; ++d) {
      if (size[d] != 1 && size[d] != full[d]) {
        refuse("mask ", b, " of shape ", shape_text(size, 3), " does not broadcast to ", shape_text(full, 3),
               ", heads, queries and keys of its sequence");
      }
    }
  }
  check_shape(mask, {end});
  if (!is_contiguous(mask)) refuse("attn_mask must be contiguous where it holds the masks of sequences");
  p.mask.data = const_cast<void*>(mask.data);
  p.mask.dtype = mask_dtype(mask);
  p.sequences.own_masks = masks.data();
}

int64_t query_batch(const AttentionParams& p) { return p.sequences.query_starts != nullptr ? 1 : p.batch; }

int64_t key_batch(const AttentionParams& p) { return p.sequences.key_starts != nullptr ? 1 : p.batch; }

int64_t query_rows(const AttentionParams& p) {
  return p.sequences.query_starts != nullptr ? p.sequences.query_rows : p.queries;
}

bool leaves_rows_out(const AttentionParams& p, Device device) {
  const int64_t* starts = p.sequences.query_starts;
  return starts != nullptr && (!on_host(device) || starts[p.batch] < p.sequences.query_rows);
}

}  // namespace selfattn::ops
