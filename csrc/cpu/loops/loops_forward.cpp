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
    T row_max = formula.sink(b, h);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!formula.sees(b, h, i, j)) continue;
      scratch.scores[j] = formula.score(b, h, i, j);
      row_max = std::max(row_max, scratch.scores[j]);
    }

    double sum = formula.exponential(formula.sink(b, h), row_max);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (formula.sees(b, h, i, j)) sum += formula.exponential(scratch.scores[j], row_max);
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

}  // namespace

void forward(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  run_rows<ForwardTask>(pool, p, outputs);
}
void weights(const AttentionParams& p, const WeightsOutputs& outputs, const ThreadPool& pool) {
  run_rows<WeightsTask>(pool, p, outputs);
}

}  // namespace selfattn::cpu::loops
