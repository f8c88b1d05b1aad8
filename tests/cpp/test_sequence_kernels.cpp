// Kernels on packed sequences, pages and caches, on plain memory: the bits of calls with one sequence, within
// their buffers, on any number of threads. Numbers that name what lies behind a sequence are wild here.
#include <atomic>

#include "attention_case.h"
#include "check.h"
#include "core/sequences.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::Buffer;

namespace {

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
    test::Random random(23);
    for (Buffer* buffer : {&query, &key, &value, &grad_out, &mask, &sinks, &slopes}) random.fill(*buffer);
    // Whole blocks that nobody sees, and single keys.
    for (int64_t n = 0; m.keys && n < mask.count(); ++n) {
      const int64_t j = n % t.most_keys;
      if (j % 11 == 3 || (j >= 128 && j < 200)) mask.set(n, -INFINITY);
    }
  }
};

// What forward, weights and backward write, for all sequences at once or one after the other.
struct Results {
  Buffer out, residual, row_max, row_sum, weights, grad_query, grad_key, grad_value, grad_mask;
  Buffer grad_slopes_rows, grad_sinks_rows;

  Results(const cpu::Kernel& kernel, Packed& c, const cpu::ThreadPool& pool, bool one_by_one)
      : out(c.grad_out.filled(NAN)),
        residual(out),
        row_max(
            Buffer(AttentionCase::accumulation(c.dtype), {1, c.heads, c.query_starts.back()}).filled(NAN)),
        row_sum(row_max),
        weights(
            Buffer(c.dtype, {static_cast<int64_t>(c.lengths.size()), c.heads, c.queries, c.keys}).filled(0)),
        grad_query(c.query.filled(0)),
        grad_key(c.key.filled(0)),
        grad_value(c.value.filled(0)),
        grad_mask(c.mask.filled(0)),
        grad_slopes_rows(row_max),
        grad_sinks_rows(row_max) {
    const AttentionParams p = c.params();
    const bool rounded = size_of(c.dtype) == 2;
    ForwardOutputs f;
    f.out = Packed::packed(out);
    f.row_max = row_max.data();
    f.row_sum = row_sum.data();
    if (rounded) f.out_residual = residual.data();
    WeightsOutputs w{row_max.data(), row_sum.data(), weights.view()};
    BackwardArguments a;
    a.grad_out = Packed::packed(c.grad_out);
    a.out = Packed::packed(out);
    if (rounded) a.out_residual = Packed::packed(residual);
    a.row_max = row_max.data();
    a.row_sum = row_sum.data();
    a.grad_query = Packed::packed(grad_query);
    a.grad_key = Packed::packed(grad_key);
    a.grad_value = Packed::packed(grad_value);
    a.grad_mask = grad_mask.broadcast_view();
    a.grad_slopes_rows = grad_slopes_rows.data();
    a.grad_sinks_rows = grad_sinks_rows.data();
    if (!one_by_one) run(kernel, p, f, w, a, pool);
    for (int64_t b = 0; one_by_one && b < p.batch; ++b) {
      const AttentionParams element = element_of(p, b);
      if (element.queries == 0) continue;
      run(kernel, element, element_of(f, p, b), element_of(w, p, b), element_of(a, p, b), pool);
    }
  }

  std::vector<std::pair<const char*, const Buffer*>> all() const {
    return {{"out", &out},
            {"row_max", &row_max},
            {"row_sum", &row_sum},
            {"weights", &weights},
            {"grad_query", &grad_query},
            {"grad_key", &grad_key},
            {"grad_value", &grad_value},
            {"grad_slopes_rows", &grad_slopes_rows},
            {"grad_sinks_rows", &grad_sinks_rows},
            {"grad_mask", &grad_mask}};
  }

 private:
  static void run(const cpu::Kernel& kernel, const AttentionParams& p, const ForwardOutputs& f,
                  const WeightsOutputs& w, BackwardArguments a, const cpu::ThreadPool& pool) {
    kernel.forward(p, f, pool);
    if (p.keys > 0) kernel.weights(p, w, pool);
    const size_t bytes = kernel.backward_workspace(p);
    void* workspace = bytes > 0 ? ::operator new(bytes, std::align_val_t{64}) : nullptr;
    a.workspace = workspace;
    kernel.backward(p, a, pool);
    ::operator delete(workspace, std::align_val_t{64});
  }
};

// Sums of numbers up to 1: of at most `terms`, in another order.
bool same_sums(const Buffer& a, const Buffer& b, double terms) {
  const double unit = a.dtype() == DType::kFloat64 ? 1e-15 : (size_of(a.dtype()) == 4 ? 1e-7 : 8e-3);
  for (int64_t n = 0; n < a.count(); ++n) {
    if (!(std::fabs(a.get(n) - b.get(n)) <= 8 * unit * terms)) return false;
  }
  return true;
}

std::string describe(const cpu::Kernel& kernel, DType dtype, const char* name) {
  return std::string(kernel.name) + " " + kernel.isa + " " + name_of(dtype) + ": " + name;
}

std::atomic<int> runs{0}, most_workers{0};

}  // namespace

TEST(sequences_have_the_bits_that_they_have_alone) {
  const MaskShape masks[] = {{true, false, true, true},  {false, true, true, true},
                             {false, false, true, true}, {false, true, false, true},
                             {false, true, true, false}, {false, false, false, false},
                             {true, true, false, true}};
  size_t turn = 0;
  for (const cpu::Kernel* kernel : test::sequence_kernels()) {
    for (const DType dtype : test::kDTypes) {
      for (const bool causal : {false, true}) {
        for (const MaskShape& shape : masks) {
          const DType mask_type = turn++ % 3 == 0 ? DType::kBFloat16 : AttentionCase::accumulation(dtype);
          Packed c(dtype, kLengths, 4, turn % 2 == 0 ? 4 : 2, 24, 17, shape, mask_type, causal);
          const Results alone(*kernel, c, test::thread_pool(1), true);
          const Results joint(*kernel, c, test::thread_pool(1), false);
          const Results threads(*kernel, c, test::thread_pool(3), false);
          const auto expected = alone.all(), one = joint.all(), three = threads.all();
          for (size_t n = 0; n < one.size(); ++n) {
            const std::string what = describe(*kernel, dtype, one[n].first);
            CHECK_FOR(one[n].second->margins_untouched(), what);
            CHECK_FOR(one[n].second->has_bits_of(*three[n].second), what + ", three threads");
            const bool summed = one[n].second == &joint.grad_mask && !shape.batch;
            CHECK_FOR(summed ? same_sums(*one[n].second, *expected[n].second, 300)
                             : one[n].second->has_bits_of(*expected[n].second),
                      what);
          }
        }
      }
    }
  }
}

TEST(sequences_take_turns_at_a_mask_whatever_their_strips) {
  // Four vectors of queries are strips of two and two, three are one strip: of 16, 8 and 4 lanes. Three
  // sequences of each kind, since a sum of two terms has one order.
  const Lengths lengths = {{64, 512}, {48, 512}, {47, 512}, {32, 512}, {24, 512},
                           {23, 512}, {16, 512}, {12, 512}, {11, 512}};
  for (const cpu::Kernel* kernel : test::sequence_kernels()) {
    Packed c(DType::kFloat32, lengths, 1, 1, 16, 16, {false, false, true, true}, DType::kFloat32, false);
    const Results one(*kernel, c, test::thread_pool(1), false);
    for (int repeat = 0; repeat < 10; ++repeat) {
      const Results three(*kernel, c, test::thread_pool(3), false);
      CHECK_FOR(three.grad_mask.has_bits_of(one.grad_mask), std::string(kernel->isa));
    }
  }
}

TEST(sequences_that_share_a_mask_share_the_threads) {
  // One chunk of keys and one kv head each: there is one work item in a sequence.
  const cpu::ThreadPool counting{3, [](int workers, void (*body)(void*), void* context) {
                                   ++runs;
                                   most_workers = std::max(most_workers.load(), workers);
                                   for (int n = 0; n < workers; ++n) body(context);
                                 }};
  const Lengths lengths = {{40, 40}, {37, 70}, {64, 30}, {5, 64}, {40, 41}};
  for (const cpu::Kernel* kernel : test::sequence_kernels()) {
    for (const MaskShape& shape :
         {MaskShape{false, true, true, true}, MaskShape{false, false, false, true}}) {
      Packed c(DType::kFloat32, lengths, 2, 1, 16, 16, shape, DType::kFloat32, false);
      runs = most_workers = 0;
      const Results results(*kernel, c, counting, false);
      CHECK_FOR(runs == 3, std::string(kernel->isa) + ": forward, weights, backward");
      CHECK_FOR(most_workers == 3, std::string(kernel->isa));
    }
  }
}
