// Packed sequences of different lengths on plain memory.
#pragma once

#include "attention_case.h"
#include "core/sequences.h"

namespace selfattn::test {

using Lengths = std::vector<std::pair<int64_t, int64_t>>;  // queries and keys of each sequence

// Around the edges of tiles, blocks and chunks; few queries beside many; nothing.
const Lengths kLengths = {{1, 5}, {0, 9}, {49, 65}, {5, 0}, {64, 64}, {4, 130}, {17, 13}, {67, 530}, {2, 3}};

// Which dimensions of the mask all sequences have one size of: the others are broadcast.
struct MaskShape {
  bool batch, heads, rows, keys;
};

struct Packed {
  DType dtype;
  Lengths lengths;
  int64_t heads, kv_heads, head_dim, value_dim;
  std::vector<int64_t> query_starts = {0}, key_starts = {0}, offsets;
  int64_t queries = 0, keys = 0;  // of the longest
  Buffer query, key, value, grad_out, mask, sinks, slopes;
  bool causal;

  Packed(DType type, const Lengths& of, int64_t h, int64_t kv, int64_t e, int64_t ev, MaskShape m,
         DType mask_type, bool is_causal)
      : Packed(type, of, h, kv, e, ev, m, mask_type, is_causal, totals(of)) {}

  AttentionParams params() {
    AttentionParams p;
    p.batch = static_cast<int64_t>(lengths.size());
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.queries = queries;
    p.keys = keys;
    p.rows_per_head = query_starts.back();
    p.head_dim = head_dim;
    p.value_dim = value_dim;
    p.dtype = dtype;
    p.query = packed(query);
    p.key = packed(key);
    p.value = packed(value);
    p.mask = mask.broadcast_view();
    p.sinks = {sinks.data(), heads, 1};
    p.alibi_slopes = {slopes.data(), 0, 1};
    p.scale = 0.7;
    p.sequences.query_starts = query_starts.data();
    p.sequences.key_starts = key_starts.data();
    p.sequences.query_rows = query_starts.back();
    p.sequences.key_rows = key_starts.back();
    if (causal) {
      p.window_right = 0;
      p.sequences.query_offsets = offsets.data();
    }
    return p;
  }
  static View packed(Buffer& buffer) {
    View view = buffer.view();
    view.stride[0] = 0;
    return view;
  }

 private:
  struct Totals {
    int64_t queries = 0, keys = 0, most_queries = 0, most_keys = 0;
  };
  static Totals totals(const Lengths& lengths) {
    Totals t;
    for (const auto& [l, s] : lengths) {
      t.queries += l;
      t.keys += s;
      t.most_queries = std::max(t.most_queries, l);
      t.most_keys = std::max(t.most_keys, s);
    }
    return t;
  }
  Packed(DType type, const Lengths& of, int64_t h, int64_t kv, int64_t e, int64_t ev, MaskShape m,
         DType mask_type, bool is_causal, Totals t)
      : dtype(type),
        lengths(of),
        heads(h),
        kv_heads(kv),
        head_dim(e),
        value_dim(ev),
        queries(t.most_queries),
        keys(t.most_keys),
        query(type, {1, h, t.queries, e}),
        key(type, {1, kv, t.keys, e}),
        value(type, {1, kv, t.keys, ev}),
        grad_out(type, {1, h, t.queries, ev}),
        mask(mask_type, {m.batch ? static_cast<int64_t>(of.size()) : 1, m.heads ? h : 1,
                         m.rows ? t.most_queries : 1, m.keys ? t.most_keys : 1}),
        sinks(AttentionCase::accumulation(type), {static_cast<int64_t>(of.size()), h}),
        slopes(AttentionCase::accumulation(type), {1, h}),
        causal(is_causal) {
    for (const auto& [l, s] : of) {
      query_starts.push_back(query_starts.back() + l);
      key_starts.push_back(key_starts.back() + s);
      offsets.push_back(s - l);
    }
    for (Buffer* buffer : {&query, &key, &value, &grad_out}) buffer->put_heads_inside();
    Random random(23);
    for (Buffer* buffer : {&query, &key, &value, &grad_out, &mask, &sinks, &slopes}) random.fill(*buffer);
    // Whole blocks that nobody sees, and single keys.
    for (int64_t n = 0; m.keys && n < mask.count(); ++n) {
      const int64_t j = n % t.most_keys;
      if (j % 11 == 3 || (j >= 128 && j < 200)) mask.set(n, -INFINITY);
    }
  }
};

// Sums of numbers up to 1: of at most `terms`, in another order.
inline bool same_sums(const Buffer& a, const Buffer& b, double terms) {
  const double unit = a.dtype() == DType::kFloat64 ? 1e-15 : (size_of(a.dtype()) == 4 ? 1e-7 : 8e-3);
  for (int64_t n = 0; n < a.count(); ++n) {
    if (!(std::fabs(a.get(n) - b.get(n)) <= 8 * unit * terms)) return false;
  }
  return true;
}

inline std::string describe(const cpu::Kernel& kernel, DType dtype, const char* name) {
  return std::string(kernel.name) + " " + kernel.isa + " " + name_of(dtype) + ": " + name;
}

}  // namespace selfattn::test
