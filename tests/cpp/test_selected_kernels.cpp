// Kernels of selected keys, on plain memory, against the loops in float64 with the mask that the lists mean.
// Kernels must stay within their buffers, and give the same bits on any number of threads.
#include "attention_case.h"
#include "comparison.h"
#include "cpu/loops/loops.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::AttentionResults;
using test::Buffer;
using test::Options;
using test::Shape;

namespace {

// Lists for each batch element, which its heads share; every third row is empty.
struct Lists {
  Selection selection;
  std::vector<int32_t> numbers;

  Lists(const Shape& s, int64_t key_size, int64_t longest) {
    const int64_t blocks = divide_up(s.keys, key_size);
    test::Random random(5);
    for (int64_t row = 0; row < s.batch * s.queries; ++row) {
      const size_t end = numbers.size() + static_cast<size_t>(longest);
      for (int64_t block = 0; block < blocks && numbers.size() < end && row % 3 != 2; ++block) {
        const double share = static_cast<double>(longest) / static_cast<double>(blocks);
        if (random.next() < 2 * share - 1) numbers.push_back(static_cast<int32_t>(block));
      }
      numbers.resize(end, -1);
    }
    selection.lists = numbers.data();
    selection.rows = s.queries;
    selection.longest = longest;
    selection.key_size = key_size;
    selection.stride[0] = s.queries * longest;
    selection.heads_per_list = s.heads;
  }
  bool has(int64_t batch, int64_t query, int64_t key) const {
    const int32_t* row = selection.row(batch, 0, query);
    for (int64_t n = 0; n < selection.longest; ++n) {
      if (row[n] >= 0 && row[n] == key / selection.key_size) return true;
    }
    return false;
  }
};

struct SelectedResults {
  Buffer out, out_residual, row_max, row_sum, grad_query, grad_key, grad_value, grad_slopes, grad_sinks;

  SelectedResults(const cpu::Kernel& kernel, AttentionCase& c, const Lists& lists,
                  const cpu::ThreadPool& pool)
      : out(c.grad_out.filled(NAN)),
        out_residual(out),
        row_max(AttentionCase::accumulation(c.dtype), c.grad_row.size()),
        row_sum(row_max),
        grad_query(c.query.filled(NAN)),
        grad_key(c.key.filled(NAN)),
        grad_value(c.value.filled(NAN)),
        grad_slopes(row_max),
        grad_sinks(row_max) {
    AttentionParams p = c.params();
    p.selection = lists.selection;
    ForwardOutputs f;
    f.out = out.view();
    f.row_max = row_max.data();
    f.row_sum = row_sum.data();
    const bool rounded = size_of(c.dtype) == 2;
    if (rounded) f.out_residual = out_residual.data();
    kernel.selected_forward(p, f, pool);
    BackwardArguments a;
    a.grad_out = c.grad_out.view();
    a.out = out.view();
    if (rounded) a.out_residual = out_residual.view();
    a.row_max = row_max.data();
    a.row_sum = row_sum.data();
    a.grad_row = c.grad_row.data();
    a.grad_query = grad_query.view();
    a.grad_key = grad_key.view();
    a.grad_value = grad_value.view();
    if (c.options.slopes) a.grad_slopes_rows = grad_slopes.data();
    if (c.options.sinks) a.grad_sinks_rows = grad_sinks.data();
    const test::Workspace workspace(kernel.selected_backward_workspace(p));
    a.workspace = workspace.data();
    kernel.selected_backward(p, a, pool);
  }

  std::vector<std::pair<const char*, const Buffer*>> all(const Options& options) const {
    std::vector<std::pair<const char*, const Buffer*>> list = {
        {"out", &out}, {"grad_query", &grad_query}, {"grad_key", &grad_key}, {"grad_value", &grad_value}};
    if (options.slopes) list.push_back({"grad_slopes_rows", &grad_slopes});
    if (options.sinks) list.push_back({"grad_sinks_rows", &grad_sinks});
    return list;
  }
};

std::vector<Options> option_sets() {
  std::vector<Options> sets(4);
  sets[1].window_right = 0;
  sets[1].query_offset = 20;
  sets[2].mask = sets[2].boolean_mask = sets[2].slopes = true;
  sets[2].softcap = 1.5;
  sets[3].sinks = true;
  sets[3].dropout = 0.4;
  sets[3].window_left = 60;
  return sets;
}

// Returns the case in float64 with a mask that hides also what the lists do not hold.
AttentionCase with_mask(const AttentionCase& c, const Lists& lists) {
  Options masked = c.options;
  masked.mask = masked.boolean_mask = true;
  AttentionCase wide(DType::kFloat64, c.shape, masked);
  const Buffer* from[] = {&c.query, &c.key, &c.value, &c.slopes, &c.sinks, &c.grad_out, &c.grad_row};
  Buffer* to[] = {&wide.query, &wide.key,      &wide.value,   &wide.slopes,
                  &wide.sinks, &wide.grad_out, &wide.grad_row};
  for (int n = 0; n < 7; ++n) {
    for (int64_t at = 0; at < from[n]->count(); ++at) to[n]->set(at, from[n]->get(at));
  }
  const int64_t queries = c.shape.queries, keys = c.shape.keys;
  for (int64_t n = 0; n < wide.mask.count(); ++n) {
    const bool seen = !c.options.mask || c.mask.get(n) != 0;
    wide.mask.set(n, seen && lists.has(n / keys / queries, n / keys % queries, n % keys));
  }
  return wide;
}

struct Kind {
  Shape shape;
  int64_t key_size, longest;
};

const Kind kKinds[] = {
    {{2, 4, 2, 19, 150, 24, 17}, 1, 9},   {{1, 6, 1, 5, 70, 64, 33}, 1, 70},
    {{1, 2, 1, 130, 200, 40, 16}, 64, 3}, {{2, 2, 2, 101, 77, 16, 24}, 16, 4},
    {{1, 2, 2, 70, 1100, 33, 8}, 130, 2}, {{1, 1, 1, 3, 65, 7, 5}, 20, 4},
    {{1, 36, 1, 4, 90, 64, 48}, 1, 30},
};

}  // namespace

TEST(selected_keys_agree_with_the_loops_and_a_mask) {
  const cpu::ThreadPool pool = test::thread_pool(2);
  for (const Kind& kind : kKinds) {
    const Lists lists(kind.shape, kind.key_size, kind.longest);
    for (const DType dtype : test::kDTypes) {
      for (const Options& options : option_sets()) {
        AttentionCase c(dtype, kind.shape, options, kind.shape.heads > 2);
        // A score of 1000 is rounded by more than the tolerance of float, so slopes are small.
        for (int64_t n = 0; n < c.slopes.count(); ++n) c.slopes.set(n, c.slopes.get(n) / 16);
        AttentionCase wide = with_mask(c, lists);
        const AttentionResults expected(cpu::kLoops, wide, pool);
        const auto expected_list = expected.all(options);
        for (const cpu::Kernel* kernel : test::available_kernels()) {
          if (kernel->selected_forward == nullptr) continue;
          const SelectedResults got(*kernel, c, lists, pool);
          const std::string what = test::describe(*kernel, dtype, kind.shape, options) + " blocks of " +
                                   std::to_string(kind.key_size);
          test::compare_statistics(got, expected, test::tolerance(dtype), what);
          for (const auto& [name, buffer] : got.all(options)) {
            for (const auto& [expected_name, expected_buffer] : expected_list) {
              if (std::string(name) != expected_name) continue;
              test::compare(*buffer, *expected_buffer, test::tolerance(dtype), what + ": " + name,
                            std::string(name) == "grad_slopes_rows");
            }
          }
        }
      }
    }
  }
}

TEST(selected_keys_give_the_same_bits_on_any_number_of_threads) {
  for (const Kind& kind : kKinds) {
    const Lists lists(kind.shape, kind.key_size, kind.longest);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Options& options : option_sets()) {
        AttentionCase c(dtype, kind.shape, options);
        for (const cpu::Kernel* kernel : test::available_kernels()) {
          if (kernel->selected_forward == nullptr) continue;
          const SelectedResults one(*kernel, c, lists, test::thread_pool(1));
          const SelectedResults several(*kernel, c, lists, test::thread_pool(3));
          const auto a = one.all(options), b = several.all(options);
          for (size_t n = 0; n < a.size(); ++n) {
            CHECK_FOR(a[n].second->has_bits_of(*b[n].second),
                      test::describe(*kernel, dtype, kind.shape, options) + ": " + a[n].first);
          }
        }
      }
    }
  }
}
