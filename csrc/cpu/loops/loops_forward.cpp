// The forward of the loops, by query rows: scores, maximum, sum, weights, weighted values.
#include <algorithm>
#include <vector>

#include "formula.h"
#include "loops.h"

namespace selfattn::cpu::loops {

namespace {

template <class T>
struct ForwardTask {
  Formula<T> formula;
  const ForwardOutputs& outputs;

  struct Scratch {
    std::vector<T> scores;    // scores of one row
    std::vector<double> out;  // output of one row
    explicit Scratch(const ForwardTask& task)
        : scores(static_cast<size_t>(task.formula.p.keys)),
          out(static_cast<size_t>(task.formula.p.value_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = formula.p;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);

    // The maximum comes first: subtracting it keeps every exponential at or below 1.
    T row_top = -std::numeric_limits<T>::infinity();
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!formula.sees(b, h, i, j)) continue;
      scratch.scores[j] = formula.score(b, h, i, j);
      row_top = std::max(row_top, scratch.scores[j]);
    }
    const T sink = formula.sink(b, h), row_max = std::max(sink, row_top);

    double sum = 0, mean = 0;  // of exponentials, and of their products with the scores
    const auto add = [&](T score) {
      const double exponential = formula.exponential(score, row_max);
      sum += exponential;
      if (exponential != 0) mean += exponential * (static_cast<double>(score) - row_max);
    };
    add(sink);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (formula.sees(b, h, i, j)) add(scratch.scores[j]);
    }
    const T row_sum = static_cast<T>(sum);

    // Weights are divided by the sum before they meet the values: a mean of large numbers is finite, their
    // sum may not be.
    std::fill(scratch.out.begin(), scratch.out.end(), 0.0);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (row_sum == 0 || !formula.sees(b, h, i, j)) continue;
      const T weight = formula.exponential(scratch.scores[j], row_max) / row_sum * formula.keep(b, h, i, j);
      for (int64_t e = 0; e < p.value_dim; ++e) {
        scratch.out[e] += static_cast<double>(weight) * load_key<double>(p, p.value, b, p.kv_head(h), j, e);
      }
    }

    for (int64_t e = 0; e < p.value_dim; ++e) {
      const T out = static_cast<T>(scratch.out[e]);
      store<T>(outputs.out, b, h, i, e, out);
      if (outputs.out_residual != nullptr) {
        View residual = outputs.out;
        residual.data = outputs.out_residual;
        store<T>(residual, b, h, i, e, out - load<T>(outputs.out, b, h, i, e));
      }
    }
    static_cast<T*>(outputs.row_max)[p.row(b, h, i)] = row_max;
    static_cast<T*>(outputs.row_sum)[p.row(b, h, i)] = row_sum;
    if (outputs.row_mean != nullptr) {
      static_cast<T*>(outputs.row_top)[p.row(b, h, i)] = row_top;
      static_cast<T*>(outputs.row_mean)[p.row(b, h, i)] = sum == 0 ? T(0) : static_cast<T>(mean / sum);
    }
  }
};

template <class T>
struct WeightsTask {
  Formula<T> formula;
  const WeightsOutputs& outputs;

  using Scratch = NoScratch;

  void operator()(int64_t item, Scratch&) const {
    const AttentionParams& p = formula.p;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    const T row_max = static_cast<const T*>(outputs.row_max)[p.row(b, h, i)];
    const T row_sum = static_cast<const T*>(outputs.row_sum)[p.row(b, h, i)];
    for (int64_t j = 0; j < p.keys; ++j) {
      T weight = 0;
      if (row_sum != 0 && formula.sees(b, h, i, j)) {
        weight = formula.exponential(formula.score(b, h, i, j), row_max) / row_sum * formula.keep(b, h, i, j);
      }
      store<T>(outputs.weights, b, h, i, j, weight);
    }
  }
};

// P of one query and key.
template <class T>
T weight_of(const Formula<T>& formula, const WeightSums& sums, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t row = formula.p.row(b, h, i);
  const T row_sum = static_cast<const T*>(sums.row_sum)[row];
  if (row_sum == 0 || !formula.sees(b, h, i, j)) return 0;
  return formula.exponential(formula.score(b, h, i, j), static_cast<const T*>(sums.row_max)[row]) / row_sum;
}

// Adds up the weights of one key over all queries.
template <class T>
struct KeySumTask {
  Formula<T> formula;
  const WeightSums& sums;

  using Scratch = NoScratch;

  void operator()(int64_t item, Scratch&) const {
    const AttentionParams& p = formula.p;
    const auto [b, h, j] = RowIndex(item, p.heads, p.keys);
    double sum = 0;
    for (int64_t i = 0; i < p.queries; ++i) sum += weight_of(formula, sums, b, h, i, j);
    static_cast<T*>(sums.of_keys)[p.key_place(b, h, j)] = static_cast<T>(sum);
  }
};

// Adds up the weights of one query times the keys' numbers.
template <class T>
struct QuerySumTask {
  Formula<T> formula;
  const WeightSums& sums;

  using Scratch = NoScratch;

  void operator()(int64_t item, Scratch&) const {
    const AttentionParams& p = formula.p;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    double sum = 0;
    for (int64_t j = 0; j < p.keys; ++j) {
      const double weight = weight_of(formula, sums, b, h, i, j);
      if (weight != 0) sum += weight * static_cast<const T*>(sums.per_key)[p.key_place(b, h, j)];
    }
    static_cast<T*>(sums.of_queries)[p.row(b, h, i)] = static_cast<T>(sum);
  }
};

}  // namespace

void forward(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  run_rows<ForwardTask>(pool, p, outputs);
}
void weights(const AttentionParams& p, const WeightsOutputs& outputs, const ThreadPool& pool) {
  run_rows<WeightsTask>(pool, p, outputs);
}
void weight_sums(const AttentionParams& p, const WeightSums& sums, const ThreadPool& pool) {
  if (sums.of_queries != nullptr) return run_rows<QuerySumTask>(pool, p, sums);
  run_items<KeySumTask>(p.batch * p.heads * p.keys, pool, p, sums);
}

}  // namespace selfattn::cpu::loops
