// Forward mode and second derivatives of every kernel of this machine that has them, on plain memory. They
// are compared with differences of the loops and with the portable kernel in float64, must stay within their
// buffers, and must be the same on any number of threads.
#include "comparison.h"
#include "tangent_case.h"
#include "thread_pool.h"

using namespace selfattn;
using test::by_differences;
using test::compare;
using test::compare_statistics;
using test::describe;
using test::kDifferenceLimit;
using test::option_sets;
using test::Options;
using test::Shape;
using test::tangent_kernels;
using test::TangentCase;
using test::TangentResults;
using test::tolerance;

namespace {

// All tangents; what MeanFlow, force matching and a frozen key and value leave of them; none.
constexpr unsigned kAll = 0b111111;
constexpr unsigned kGiven[] = {kAll, 0b000111, 0b001000, 0b000001, 0b110010, 0b000100, 0};

// Checks the results that the options ask for.
void check(const TangentResults& got, const TangentResults& expected, double limit, const TangentCase& c,
           const cpu::Kernel& kernel) {
  const std::string what =
      describe(kernel, c.dtype, c.shape, c.options) + " tangents " + std::to_string(c.given);
  compare_statistics(got, expected, limit, what);
  const auto expected_list = expected.all(c.options), got_list = got.all(c.options);
  for (size_t n = 0; n < got_list.size(); ++n) {
    compare(*got_list[n].second, *expected_list[n].second, limit, what + ": " + got_list[n].first,
            std::string(got_list[n].first) != "out");
  }
}

}  // namespace

TEST(derivatives_agree_with_differences_of_the_loops) {
  const Shape shape{2, 4, 2, 5, 7, 3, 2};
  const cpu::ThreadPool pool = test::serial_pool(1);
  for (const Options& options : option_sets()) {
    for (const unsigned given : kGiven) {
      TangentCase c(DType::kFloat64, shape, options, given);
      const TangentResults expected = by_differences(c, pool);
      for (const cpu::Kernel* kernel : tangent_kernels()) {
        check(TangentResults(*kernel, c, pool), expected, kDifferenceLimit, c, *kernel);
      }
    }
  }
}

TEST(derivatives_agree_with_the_portable_kernel_in_float64) {
  const Shape shapes[] = {{1, 1, 1, 1, 1, 1, 1},     {2, 4, 2, 17, 35, 7, 5},   {1, 2, 1, 3, 70, 16, 24},
                          {1, 2, 2, 65, 67, 33, 16}, {1, 1, 1, 1, 129, 64, 64}, {1, 2, 1, 48, 9, 0, 3},
                          {1, 2, 1, 5, 6, 4, 0}};
  const cpu::ThreadPool pool = test::thread_pool(2);
  const cpu::Kernel& portable = *tangent_kernels().back();
  size_t turn = 0;
  for (const Shape& shape : shapes) {
    for (const DType dtype : test::kDTypes) {
      for (const Options& options : option_sets()) {
        const unsigned given = turn++ % 2 == 0 ? kAll : kGiven[turn / 2 % std::size(kGiven)];
        TangentCase c(dtype, shape, options, given, shape.heads > 1);
        TangentCase wide = c.in_float64();
        const TangentResults expected(portable, wide, pool);
        check(expected, by_differences(wide, pool), kDifferenceLimit, wide, portable);
        for (const cpu::Kernel* kernel : tangent_kernels()) {
          check(TangentResults(*kernel, c, pool), expected, tolerance(dtype), c, *kernel);
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
    const TangentResults expected = by_differences(wide, pool);
    for (const cpu::Kernel* kernel : tangent_kernels()) {
      check(TangentResults(*kernel, c, pool), expected, std::fmax(tolerance(dtype), kDifferenceLimit), c,
            *kernel);
    }
  }
}

TEST(derivatives_do_not_depend_on_the_threads) {
  // The second has two panels of queries and several blocks of keys, whose items wait for each other.
  for (const Shape& shape : {Shape{2, 4, 2, 70, 130, 16, 20}, Shape{2, 2, 1, 200, 330, 8, 4}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Options& options : option_sets()) {
        TangentCase c(dtype, shape, options, kAll);
        for (const cpu::Kernel* kernel : tangent_kernels()) {
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
