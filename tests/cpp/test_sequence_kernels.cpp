// Kernels on packed sequences, pages and caches, on plain memory. Results have the bits of calls with one
// sequence, on any number of threads, and kernels stay within their buffers. Numbers that refer to what comes
// after a sequence are wild here.
#include <atomic>

#include "check.h"
#include "packed_case.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::Buffer;
using test::describe;
using test::kLengths;
using test::Lengths;
using test::MaskShape;
using test::Packed;
using test::same_sums;

namespace {

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
    const test::Workspace workspace(kernel.backward_workspace(p));
    a.workspace = workspace.data();
    kernel.backward(p, a, pool);
  }
};

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
  // Four vectors of queries make strips of two and two, and three vectors make one strip, of 16, 8 and 4
  // lanes. There are three sequences of each kind, because a sum of two terms has only one order.
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
  // Each sequence has one chunk of keys and one kv head, so it has one work item.
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
