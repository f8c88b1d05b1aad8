// Tests of the loops kernel, which the other tests rely on. Its forward is compared with the formula written
// out once more, its backward with differences of the forward.
#include <limits>

#include "attention_case.h"
#include "check.h"
#include "core/philox.h"
#include "cpu/loops/loops.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::AttentionResults;
using test::Buffer;
using test::Options;

namespace {

const cpu::ThreadPool kOneThread = test::serial_pool(1);

std::vector<Options> option_sets() {
  std::vector<Options> sets(9);
  sets[1].mask = true;
  sets[2].mask = sets[2].broadcast_mask = true;
  sets[3].mask = sets[3].boolean_mask = true;
  sets[4].slopes = true;
  sets[4].query_offset = 2;
  sets[5].sinks = true;
  sets[6].softcap = 0.8;
  sets[7].window_left = 2;
  sets[7].window_right = 0;
  sets[7].query_offset = 1;
  Options& everything = sets[8];
  everything.mask = everything.broadcast_mask = everything.slopes = everything.sinks = true;
  everything.grad_weights = true;
  everything.dropout = 0.3;
  everything.softcap = 1.5;
  everything.window_left = 4;
  everything.window_right = 3;
  return sets;
}

// Σ grad_out·out + Σ grad_weights·weights + Σ grad_lse·lse of a forward in float64.
double loss(AttentionCase& c) {
  const AttentionResults r(cpu::kLoops, c, kOneThread);
  double sum = 0.0;
  for (int64_t n = 0; n < r.out.count(); ++n) sum += c.grad_out.get(n) * r.out.get(n);
  if (c.options.grad_weights) {
    for (int64_t n = 0; n < r.weights.count(); ++n) sum += c.grad_weights.get(n) * r.weights.get(n);
  }
  return sum;
}

// grad_row for that loss: Σ_j weights·grad_weights.
void set_grad_row(AttentionCase& c) {
  const AttentionResults r(cpu::kLoops, c, kOneThread);
  for (int64_t row = 0; row < c.grad_row.count(); ++row) {
    double sum = 0.0;
    for (int64_t j = 0; c.options.grad_weights && j < c.shape.keys; ++j) {
      const int64_t n = row * c.shape.keys + j;
      sum += c.grad_weights.get(n) * r.weights.get(n);
    }
    c.grad_row.set(row, sum);
  }
}

// Moves `input` along a random direction and compares the change of the loss with the gradient's prediction.
void check_direction(AttentionCase& c, Buffer& input, const std::vector<double>& gradient,
                     const std::string& what) {
  constexpr double kStep = 1e-5;
  test::Random random(5);
  const Buffer before = input;
  std::vector<double> direction(static_cast<size_t>(input.count()));
  double predicted = 0.0;
  for (size_t n = 0; n < direction.size(); ++n) {
    direction[n] = random.next();
    if (std::isfinite(before.get(static_cast<int64_t>(n)))) predicted += direction[n] * gradient[n];
  }
  const auto loss_at = [&](double step) {
    for (int64_t n = 0; n < input.count(); ++n) {
      input.set(n, before.get(n) + step * direction[static_cast<size_t>(n)]);
    }
    return loss(c);
  };
  const double measured = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
  input = before;
  CHECK_FOR(std::fabs(measured - predicted) < 1e-7 * (1 + std::fabs(predicted)),
            what + c.options.text() + ": " + std::to_string(measured) + " " + std::to_string(predicted));
}

std::vector<double> numbers(const Buffer& buffer) {
  std::vector<double> all;
  for (int64_t n = 0; n < buffer.count(); ++n) all.push_back(buffer.get(n));
  return all;
}

// (batch, heads, queries) summed over the queries, and over the batch as well.
std::vector<double> per_head(const Buffer& rows, const AttentionCase& c, bool over_batch) {
  std::vector<double> sums(static_cast<size_t>((over_batch ? 1 : c.shape.batch) * c.shape.heads), 0.0);
  for (int64_t n = 0; n < rows.count(); ++n) {
    const int64_t head = n / c.shape.queries;
    sums[static_cast<size_t>(over_batch ? head % c.shape.heads : head)] += rows.get(n);
  }
  return sums;
}

}  // namespace

TEST(the_forward_is_the_formula) {
  AttentionCase c(DType::kFloat64, {2, 4, 2, 5, 6, 3, 4}, {});
  const AttentionResults r(cpu::kLoops, c, kOneThread);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) {
      const int64_t kv = b * 2 + h / 2;
      for (int64_t i = 0; i < 5; ++i) {
        const int64_t row = (b * 4 + h) * 5 + i;
        double weight[6], sum = 0.0;
        for (int64_t j = 0; j < 6; ++j) {
          double dot = 0.0;
          for (int64_t e = 0; e < 3; ++e) dot += c.query.get(row * 3 + e) * c.key.get((kv * 6 + j) * 3 + e);
          sum += weight[j] = std::exp(0.7 * dot);
        }
        for (int64_t e = 0; e < 4; ++e) {
          double out = 0.0;
          for (int64_t j = 0; j < 6; ++j) out += weight[j] / sum * c.value.get((kv * 6 + j) * 4 + e);
          CHECK(std::fabs(out - r.out.get(row * 4 + e)) < 1e-14);
        }
        for (int64_t j = 0; j < 6; ++j)
          CHECK(std::fabs(weight[j] / sum - r.weights.get(row * 6 + j)) < 1e-14);
        CHECK(std::fabs(std::log(sum) - r.row_max.get(row) - std::log(r.row_sum.get(row))) < 1e-14);
      }
    }
  }
}

TEST(out_is_weights_times_value) {
  for (const Options& options : option_sets()) {
    AttentionCase c(DType::kFloat64, {2, 2, 1, 5, 7, 3, 4}, options);
    const AttentionResults r(cpu::kLoops, c, kOneThread);
    for (int64_t row = 0; row < 2 * 2 * 5; ++row) {
      const int64_t batch = row / 10;
      for (int64_t e = 0; e < 4; ++e) {
        double out = 0.0;
        for (int64_t j = 0; j < 7; ++j)
          out += r.weights.get(row * 7 + j) * c.value.get((batch * 7 + j) * 4 + e);
        CHECK_FOR(std::fabs(out - r.out.get(row * 4 + e)) < 1e-14, options.text());
      }
    }
  }
}

TEST(gradients_predict_the_change_of_the_loss) {
  for (const Options& options : option_sets()) {
    AttentionCase c(DType::kFloat64, {2, 4, 2, 5, 6, 3, 4}, options);
    set_grad_row(c);
    const AttentionResults r(cpu::kLoops, c, kOneThread);
    check_direction(c, c.query, numbers(r.grad_query), "query");
    check_direction(c, c.key, numbers(r.grad_key), "key");
    check_direction(c, c.value, numbers(r.grad_value), "value");
    if (options.mask && !options.boolean_mask) check_direction(c, c.mask, numbers(r.grad_mask), "mask");
    if (options.slopes) check_direction(c, c.slopes, per_head(r.grad_slopes_rows, c, true), "slopes");
    if (options.sinks) check_direction(c, c.sinks, per_head(r.grad_sinks_rows, c, false), "sinks");
  }
}

// Every kernel and every release must drop the same weights for the same seed.
TEST(dropout_follows_the_documented_counter) {
  const test::Shape shape{2, 3, 1, 4, 10, 2, 2};
  Options options;
  AttentionCase plain(DType::kFloat64, shape, options);
  options.dropout = 0.25;
  AttentionCase c(DType::kFloat64, shape, options);
  const AttentionResults whole(cpu::kLoops, plain, kOneThread);
  const AttentionResults dropped(cpu::kLoops, c, kOneThread);
  for (int64_t n = 0; n < dropped.weights.count(); ++n) {
    const int64_t j = n % 10, i = n / 10 % 4, h = n / 40 % 3, b = n / 120;
    const Philox4 words =
        philox(static_cast<uint64_t>(c.seed), static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
               static_cast<uint32_t>(h), static_cast<uint32_t>(b));
    const double expected = words.word[j % 4] < (uint64_t{1} << 30) ? 0.0 : whole.weights.get(n) / 0.75;
    CHECK_FOR(std::fabs(dropped.weights.get(n) - expected) < 1e-15, std::to_string(n));
  }
}

TEST(a_row_that_sees_nothing_is_zero) {
  Options options;
  options.window_right = 0;
  options.query_offset = -2;  // queries 0 and 1 stand before the first key
  options.slopes = true;
  AttentionCase c(DType::kFloat32, {1, 1, 1, 4, 3, 2, 2}, options);
  const AttentionResults r(cpu::kLoops, c, kOneThread);
  for (int64_t row = 0; row < 2; ++row) {
    CHECK(r.row_max.get(row) == -std::numeric_limits<double>::infinity());
    CHECK(r.row_sum.get(row) == 0);
    CHECK(r.grad_slopes_rows.get(row) == 0);
    for (int64_t n = 0; n < 2; ++n) CHECK(r.out.get(row * 2 + n) == 0 && r.grad_query.get(row * 2 + n) == 0);
    for (int64_t j = 0; j < 3; ++j) CHECK(r.weights.get(row * 3 + j) == 0);
  }
  CHECK(r.row_sum.get(2) == 1);
}
