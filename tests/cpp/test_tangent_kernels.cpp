// Forward mode and second derivatives of every kernel that this machine can run, on plain memory: those of
// the loops against differences, the others against the loops in float64, within their buffers, and the same
// on any number of threads.
#include "comparison.h"
#include "cpu/loops/loops.h"
#include "tangent_case.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::Buffer;
using test::compare;
using test::compare_statistics;
using test::describe;
using test::option_sets;
using test::Options;
using test::Shape;
using test::TangentCase;
using test::TangentResults;
using test::tolerance;

namespace {

// All tangents; what MeanFlow, force matching and a frozen key and value leave of them; none.
constexpr unsigned kAll = 0b111111;
constexpr unsigned kGiven[] = {kAll, 0b000111, 0b001000, 0b000001, 0b110010, 0b000100, 0};

// The case with its inputs moved by `step` along its tangents.
TangentCase moved(const TangentCase& c, const TangentCase& direction, double step) {
  TangentCase there = c, along = direction;
  for (size_t b = 0; b < 6; ++b) {
    if (!along.has(b)) continue;
    Buffer& input = *there.inputs()[b];
    for (int64_t n = 0; n < input.count(); ++n) {
      if (std::isfinite(input.get(n))) input.set(n, input.get(n) + step * along.tangents()[b]->get(n));
    }
  }
  return there;
}

// F of Note [Second derivatives], where a row sees anything.
double inner_product(const TangentCase& c, const TangentResults& r) {
  double sum = 0;
  for (int64_t n = 0; n < r.out.count(); ++n) sum += c.grad_out.get(n) * r.tangent_out.get(n);
  for (int64_t n = 0; n < r.row_max.count(); ++n) sum -= c.grad_row.get(n) * r.tangent_lse.get(n);
  return sum;
}

double log_sum(const TangentResults& r, int64_t row) {
  return r.row_max.get(row) + std::log(r.row_sum.get(row));
}

// <gradients, direction> of what the second derivatives are with respect to the inputs.
double along(TangentCase& d, const TangentResults& r) {
  double sum = 0;
  const Buffer* gradients[] = {&r.grad_query, &r.grad_key, &r.grad_value, &r.grad_mask};
  for (size_t b = 0; b < 4; ++b) {
    for (int64_t n = 0; d.has(b) && n < gradients[b]->count(); ++n) {
      const double tangent = d.tangents()[b]->get(n);
      if (!std::isnan(tangent)) sum += gradients[b]->get(n) * tangent;
    }
  }
  for (int64_t n = 0; n < r.row_max.count(); ++n) {
    const int64_t head = n / d.shape.queries;  // counted over the batch
    if (d.has(4)) sum += r.grad_slopes_rows.get(n) * d.tangent_slopes.get(head % d.shape.heads);
    if (d.has(5)) sum += r.grad_sinks_rows.get(n) * d.tangent_sinks.get(head);
  }
  return sum;
}

}  // namespace

TEST(the_loops_agree_with_differences) {
  constexpr double kStep = 1e-5, kLimit = 1e-7;
  const Shape shape{2, 4, 2, 5, 7, 3, 2};
  const cpu::ThreadPool pool = test::serial_pool(1);
  for (const Options& options : option_sets()) {
    for (const unsigned given : kGiven) {
      TangentCase c(DType::kFloat64, shape, options, given);
      TangentCase ahead = moved(c, c, kStep), behind = moved(c, c, -kStep);
      const TangentResults here(cpu::kLoops, c, pool), there(cpu::kLoops, ahead, pool),
          back(cpu::kLoops, behind, pool);
      const std::string what =
          describe(cpu::kLoops, c.dtype, shape, options) + " tangents " + std::to_string(given);
      for (int64_t n = 0; n < here.out.count(); ++n) {
        const double difference = (there.out.get(n) - back.out.get(n)) / (2 * kStep);
        CHECK_FOR(test::near(here.tangent_out.get(n), difference, kLimit, std::fabs(difference)), what);
      }
      for (int64_t n = 0; n < here.row_max.count(); ++n) {
        const bool dead = here.row_sum.get(n) == 0;
        const double difference = dead ? 0 : (log_sum(there, n) - log_sum(back, n)) / (2 * kStep);
        CHECK_FOR(test::near(here.tangent_lse.get(n), difference, kLimit, std::fabs(difference)), what);
      }
      // In a direction of its own, with every tangent that there is.
      TangentCase direction = c;
      direction.given = kAll;
      test::Random random(31);
      for (Buffer* buffer : direction.tangents()) {
        for (int64_t n = 0; n < buffer->count(); ++n) {
          if (!std::isnan(buffer->get(n))) buffer->set(n, random.next());
        }
      }
      TangentCase on = moved(c, direction, kStep), off = moved(c, direction, -kStep);
      const TangentResults after(cpu::kLoops, on, pool), before(cpu::kLoops, off, pool);
      const double difference = (inner_product(on, after) - inner_product(off, before)) / (2 * kStep);
      CHECK_FOR(test::near(along(direction, here), difference, kLimit, std::fabs(difference)), what);
    }
  }
}

TEST(derivatives_agree_with_the_loops_in_float64) {
  const Shape shapes[] = {{1, 1, 1, 1, 1, 1, 1},     {2, 4, 2, 17, 35, 7, 5},   {1, 2, 1, 3, 70, 16, 24},
                          {1, 2, 2, 65, 67, 33, 16}, {1, 1, 1, 1, 129, 64, 64}, {1, 2, 1, 48, 9, 0, 3},
                          {1, 2, 1, 5, 6, 4, 0}};
  const cpu::ThreadPool pool = test::thread_pool(2);
  size_t turn = 0;
  for (const Shape& shape : shapes) {
    for (const DType dtype : test::kDTypes) {
      for (const Options& options : option_sets()) {
        const unsigned given = turn++ % 2 == 0 ? kAll : kGiven[turn / 2 % std::size(kGiven)];
        TangentCase c(dtype, shape, options, given, shape.heads > 1);
        TangentCase wide = c.in_float64();
        const TangentResults expected(cpu::kLoops, wide, pool);
        for (const cpu::Kernel* kernel : test::available_kernels()) {
          const TangentResults got(*kernel, c, pool);
          const std::string what =
              describe(*kernel, dtype, shape, options) + " tangents " + std::to_string(given);
          compare_statistics(got, expected, tolerance(dtype), what);
          const auto expected_list = expected.all(options), got_list = got.all(options);
          for (size_t n = 0; n < got_list.size(); ++n) {
            compare(*got_list[n].second, *expected_list[n].second, tolerance(dtype),
                    what + ": " + got_list[n].first, std::string(got_list[n].first) != "out");
          }
        }
      }
    }
  }
}

TEST(many_keys_take_no_more_memory) {
  // More than a worker keeps tiles of: the others are computed twice.
  const cpu::ThreadPool pool = test::thread_pool(2);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
    Options options;
    options.window_left = 11900;
    TangentCase c(dtype, {1, 2, 1, 3, 12000, 3, 2}, options, kAll);
    TangentCase wide = c.in_float64();
    const TangentResults expected(cpu::kLoops, wide, pool);
    for (const cpu::Kernel* kernel : test::available_kernels()) {
      const TangentResults got(*kernel, c, pool);
      const auto expected_list = expected.all(options), got_list = got.all(options);
      for (size_t n = 0; n < got_list.size(); ++n) {
        compare(*got_list[n].second, *expected_list[n].second, tolerance(dtype),
                describe(*kernel, dtype, c.shape, options) + ": " + got_list[n].first);
      }
    }
  }
}

TEST(derivatives_do_not_depend_on_the_threads) {
  // The second has two panels of queries and several blocks of keys, whose items wait for each other.
  for (const Shape& shape : {Shape{2, 4, 2, 70, 130, 16, 20}, Shape{2, 2, 1, 200, 330, 8, 4}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Options& options : option_sets()) {
        TangentCase c(dtype, shape, options, kAll);
        for (const cpu::Kernel* kernel : test::available_kernels()) {
          // Its items do not wait, and it takes a second for each of these.
          if (kernel == &cpu::kLoops && shape.queries > 100) continue;
          const TangentResults one(*kernel, c, test::thread_pool(1));
          for (const cpu::ThreadPool& pool : {test::thread_pool(3), test::serial_pool(4)}) {
            const TangentResults several(*kernel, c, pool);
            const auto a = one.all(options), b = several.all(options);
            for (size_t n = 0; n < a.size(); ++n) {
              CHECK_FOR(a[n].second->has_bits_of(*b[n].second),
                        describe(*kernel, dtype, shape, options) + ": " + a[n].first);
            }
          }
        }
      }
    }
  }
}
