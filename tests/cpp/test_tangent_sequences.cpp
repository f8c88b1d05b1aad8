// Forward mode and second derivatives of packed sequences, on plain memory, and forward mode of keys in
// pages. They have the bits of calls with one sequence, within their buffers, on any number of threads.
#include <climits>

#include "check.h"
#include "core/tangents.h"
#include "packed_case.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::Buffer;
using test::describe;
using test::kLengths;
using test::MaskShape;
using test::Packed;
using test::same_sums;

namespace {

// A direction for a packed call: each tangent is shaped as its input.
struct Direction {
  Buffer query, key, value, mask, sinks, slopes;

  explicit Direction(const Packed& c)
      : query(c.query), key(c.key), value(c.value), mask(c.mask), sinks(c.sinks), slopes(c.slopes) {
    test::Random random(37);
    for (Buffer* buffer : {&query, &key, &value, &mask, &sinks, &slopes}) random.fill(*buffer);
  }
  Tangents view(int64_t heads) {
    Tangents t;
    t.query = Packed::packed(query);
    t.key = Packed::packed(key);
    t.value = Packed::packed(value);
    t.mask = mask.broadcast_view();
    t.sinks = {sinks.data(), heads, 1};
    t.alibi_slopes = {slopes.data(), 0, 1};
    return t;
  }
};

// What the two entry points write, for all sequences at once or one after the other.
struct Results {
  Buffer out, residual, row_max, row_sum, tangent_out, tangent_lse, tangent_out_again, tangent_lse_again;
  Buffer grad_query, grad_key, grad_value, grad_mask, grad_slopes_rows, grad_sinks_rows;

  Results(const cpu::Kernel& kernel, Packed& c, const cpu::ThreadPool& pool, bool one_by_one)
      : out(c.grad_out.filled(NAN)),
        residual(out),
        row_max(
            Buffer(AttentionCase::accumulation(c.dtype), {1, c.heads, c.query_starts.back()}).filled(NAN)),
        row_sum(row_max),
        tangent_out(out),
        tangent_lse(row_max),
        tangent_out_again(out),
        tangent_lse_again(row_max),
        grad_query(c.query.filled(0)),
        grad_key(c.key.filled(0)),
        grad_value(c.value.filled(0)),
        grad_mask(c.mask.filled(0)),
        grad_slopes_rows(row_max),
        grad_sinks_rows(row_max) {
    const AttentionParams p = c.params();
    const bool rounded = size_of(c.dtype) == 2;
    Direction direction(c);
    JvpArguments jvp;
    jvp.tangents = direction.view(c.heads);
    jvp.forward = {Packed::packed(out), row_max.data(), row_sum.data(), rounded ? residual.data() : nullptr};
    jvp.tangent_out = Packed::packed(tangent_out);
    jvp.tangent_lse = tangent_lse.data();
    BackwardBackwardArguments second;
    second.tangents = jvp.tangents;
    second.tangent_out = Packed::packed(tangent_out_again);
    second.tangent_lse = tangent_lse_again.data();
    BackwardArguments& a = second.backward;
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
    if (!one_by_one) run(kernel, p, jvp, second, pool);
    for (int64_t b = 0; one_by_one && b < p.batch; ++b) {
      const AttentionParams element = element_of(p, b);
      if (element.queries == 0) continue;
      BackwardBackwardArguments own = element_of(second, p, b);
      if (a.grad_mask.stride[0] != 0) {
        run(kernel, element, element_of(jvp, p, b), own, pool);
        continue;
      }
      // A call stores the sum of its own rows.
      Buffer of_element = grad_mask.filled(0);
      own.backward.grad_mask.data = of_element.data();
      run(kernel, element, element_of(jvp, p, b), own, pool);
      for (int64_t n = 0; n < grad_mask.count(); ++n) grad_mask.set(n, grad_mask.get(n) + of_element.get(n));
    }
  }

  std::vector<std::pair<const char*, const Buffer*>> all() const {
    return {{"out", &out},
            {"row_max", &row_max},
            {"row_sum", &row_sum},
            {"tangent_out", &tangent_out},
            {"tangent_lse", &tangent_lse},
            {"tangent_out again", &tangent_out_again},
            {"tangent_lse again", &tangent_lse_again},
            {"grad_query", &grad_query},
            {"grad_key", &grad_key},
            {"grad_value", &grad_value},
            {"grad_slopes_rows", &grad_slopes_rows},
            {"grad_sinks_rows", &grad_sinks_rows},
            {"grad_mask", &grad_mask}};
  }

 private:
  static void run(const cpu::Kernel& kernel, const AttentionParams& p, const JvpArguments& jvp,
                  BackwardBackwardArguments second, const cpu::ThreadPool& pool) {
    kernel.jvp(p, jvp, pool);
    const test::Workspace workspace(kernel.backward_backward_workspace(p));
    second.backward.workspace = workspace.data();
    kernel.backward_backward(p, second, pool);
  }
};

bool same_bits(const Buffer& a, const Buffer& b) { return a.margins_untouched() && a.has_bits_of(b); }

}  // namespace

TEST(sequences_have_the_derivatives_that_they_have_alone) {
  const MaskShape masks[] = {{true, false, true, true},
                             {false, true, true, true},
                             {false, true, false, true},
                             {false, false, false, false}};
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
            CHECK_FOR(summed ? same_sums(*one[n].second, *expected[n].second, 4)
                             : one[n].second->has_bits_of(*expected[n].second),
                      what);
          }
        }
      }
    }
  }
}

// Tangents lie in the same pages as their keys and values. Entries of the table behind a length are wild, and
// rows behind it are NaN.
TEST(pages_change_no_bit_of_a_tangent) {
  const std::vector<int64_t> lengths = {0, 1, 65, 130};
  const int64_t batch = 4, heads = 4, kv_heads = 2, queries = 5, keys = 130, dim = 24, value_dim = 17;
  for (const DType dtype : test::kDTypes) {
    Buffer query(dtype, {batch, heads, queries, dim}), tangent_query = query;
    Buffer rows[4] = {
        Buffer(dtype, {batch, kv_heads, keys, dim}), Buffer(dtype, {batch, kv_heads, keys, dim}),
        Buffer(dtype, {batch, kv_heads, keys, value_dim}), Buffer(dtype, {batch, kv_heads, keys, value_dim})};
    test::Random random(41);
    for (Buffer* buffer : {&query, &tangent_query, &rows[0], &rows[1], &rows[2], &rows[3]}) {
      random.fill(*buffer);
    }
    AttentionParams p;
    p.batch = batch;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.queries = p.rows_per_head = queries;
    p.keys = keys;
    p.head_dim = dim;
    p.value_dim = value_dim;
    p.dtype = dtype;
    p.query = query.view();
    p.scale = 0.7;
    p.window_right = 0;
    std::vector<int64_t> offsets;
    for (const int64_t length : lengths) offsets.push_back(length - queries);
    p.sequences.key_lengths = lengths.data();
    p.sequences.query_offsets = offsets.data();

    struct Tangent {
      Buffer out, lse;
    };
    const auto run = [&](const cpu::Kernel& kernel, Buffer(&in)[4], const Pages& pages, int threads) {
      Buffer out = Buffer(dtype, {batch, heads, queries, value_dim}).filled(NAN);
      Buffer row_max = Buffer(AttentionCase::accumulation(dtype), {batch, heads, queries}).filled(NAN);
      Buffer row_sum = row_max;
      Tangent tangent{out, row_max};
      AttentionParams call = p;
      call.key = in[0].view();
      call.value = in[2].view();
      call.pages = pages;
      JvpArguments a;
      a.tangents.query = tangent_query.view();
      a.tangents.key = in[1].view();
      a.tangents.value = in[3].view();
      a.forward = {out.view(), row_max.data(), row_sum.data(), nullptr};
      a.tangent_out = tangent.out.view();
      a.tangent_lse = tangent.lse.data();
      kernel.jvp(call, a, test::thread_pool(threads));
      return tangent;
    };
    for (const cpu::Kernel* kernel : test::sequence_kernels()) {
      const Tangent expected = run(*kernel, rows, {}, 1);
      for (const int64_t size : {1, 7, 64}) {
        // From the last page to the first.
        const int64_t columns = (keys + size - 1) / size;
        int32_t count = 0;
        for (const int64_t length : lengths) count += static_cast<int32_t>((length + size - 1) / size);
        std::vector<int32_t> table(static_cast<size_t>(batch * columns), INT_MAX);
        Buffer pages[4] = {Buffer(dtype, {count, kv_heads, size, dim}),
                           Buffer(dtype, {count, kv_heads, size, dim}),
                           Buffer(dtype, {count, kv_heads, size, value_dim}),
                           Buffer(dtype, {count, kv_heads, size, value_dim})};
        for (Buffer& buffer : pages) buffer = buffer.filled(NAN);
        int32_t next = count;
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t j = 0; j < lengths[b]; ++j) {
            int32_t& page = table[b * columns + j / size];
            if (j % size == 0) page = --next;
            for (int n = 0; n < 4; ++n) {
              const int64_t width = rows[n].size()[3];
              for (int64_t at = 0; at < kv_heads * width; ++at) {
                const int64_t h = at / width, e = at % width;
                pages[n].set(((page * kv_heads + h) * size + j % size) * width + e,
                             rows[n].get(((b * kv_heads + h) * keys + j) * width + e));
              }
            }
          }
        }
        for (const int threads : {1, 3}) {
          const Tangent got = run(*kernel, pages, {table.data(), columns, size, count}, threads);
          const std::string what = describe(*kernel, dtype, "pages of ") + std::to_string(size) +
                                   ", threads " + std::to_string(threads);
          CHECK_FOR(same_bits(got.out, expected.out), what);
          CHECK_FOR(same_bits(got.lse, expected.lse), what);
        }
      }
    }
  }
}
