// What tests of kernels on plain memory share: sets of options, names of cases, tolerances.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "attention_case.h"
#include "check.h"

namespace selfattn::test {

inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-12;
    case DType::kFloat32:
      return 1e-5;
    case DType::kFloat16:
      return 1e-3;
    default:
      return 8e-3;
  }
}

inline std::vector<Options> option_sets() {
  std::vector<Options> sets(7);
  sets[1].mask = true;
  sets[1].window_right = 0;
  sets[2].mask = sets[2].boolean_mask = sets[2].sinks = true;
  sets[3].mask = sets[3].broadcast_mask = sets[3].grad_weights = true;
  sets[4].slopes = true;
  sets[4].softcap = 1.5;
  sets[4].query_offset = -3;
  sets[5].window_left = 9;
  sets[5].window_right = 2;
  sets[5].dropout = 0.4;
  Options& everything = sets[6];
  everything.mask = everything.broadcast_mask = everything.boolean_mask = true;
  everything.slopes = everything.sinks = everything.grad_weights = true;
  everything.dropout = 0.2;
  everything.softcap = 2.0;
  everything.window_left = 40;
  everything.window_right = 3;
  everything.query_offset = 5;
  return sets;
}

inline std::string describe(const cpu::Kernel& kernel, DType dtype, const Shape& s, const Options& options) {
  return std::string(kernel.name) + " " + kernel.isa + " " + name_of(dtype) + " L" +
         std::to_string(s.queries) + " S" + std::to_string(s.keys) + " E" + std::to_string(s.head_dim) +
         " Ev" + std::to_string(s.value_dim) + options.text();
}

inline bool near(double got, double expected, double limit, double size) {
  if (std::isinf(expected)) return got == expected;
  return std::fabs(got - expected) <= limit * (1 + size);
}

inline double largest(const Buffer& buffer) {
  double found = 0;
  for (int64_t n = 0; n < buffer.count(); ++n) found = std::fmax(found, std::fabs(buffer.get(n)));
  return found;
}

// With `sums`, the numbers are sums whose terms nearly cancel, so rounding is relative to the size of the
// terms: the largest of all sums stands for it.
inline void compare(const Buffer& got, const Buffer& expected, double limit, const std::string& what,
                    bool sums = false) {
  CHECK_FOR(got.margins_untouched(), what);
  const double size = sums ? largest(expected) : 0;
  for (int64_t n = 0; n < got.count(); ++n) {
    if (near(got.get(n), expected.get(n), limit, sums ? size : std::fabs(expected.get(n)))) continue;
    test::fail(__FILE__, __LINE__,
               what + " at " + std::to_string(n) + ": " + std::to_string(got.get(n)) + " for " +
                   std::to_string(expected.get(n)));
    return;
  }
}

// A kernel may return a number up to 8 below a row's maximum instead of it, if its sum is relative to the
// same number: together they give the logarithm of the sum of exponentials.
template <class Results, class Expected>
void compare_statistics(const Results& got, const Expected& expected, double limit, const std::string& what) {
  CHECK_FOR(got.row_max.margins_untouched() && got.row_sum.margins_untouched(), what);
  for (int64_t n = 0; n < got.row_max.count(); ++n) {
    const double most = got.row_max.get(n), exact = expected.row_max.get(n);
    const double log_sum = most + std::log(got.row_sum.get(n));
    const double exact_log_sum = exact + std::log(expected.row_sum.get(n));
    const bool right = near(log_sum, exact_log_sum, limit, std::fabs(exact_log_sum)) &&
                       (std::isinf(exact) ? most == exact
                                          : near(std::fmax(most, exact), exact, limit, std::fabs(exact)) &&
                                                most >= exact - 8 - limit * (1 + std::fabs(exact)));
    if (right) continue;
    test::fail(__FILE__, __LINE__,
               what + ": maximum and log of the sum at " + std::to_string(n) + ": " + std::to_string(most) +
                   " and " + std::to_string(log_sum) + " for " + std::to_string(exact) + " and " +
                   std::to_string(exact_log_sum));
    return;
  }
}

}  // namespace selfattn::test
