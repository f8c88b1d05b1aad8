// The backward of the loops. With W = P∘keep for the weights after dropout, out = W·V, and dX for the
// gradient of X:
//
//   delta_i  = Σ_e dout_ie out_ie + grad_row_i          what normalising by the row sum takes back
//   dW_ij    = Σ_e dout_ie v_je + grad_weights_ij
//   ds_ij    = P_ij (dW_ij keep_ij + grad_mean_i (s_ij − max_i) + grad_keys_j − delta_i)
//   dQ_i     = scale Σ_j ds_ij cap'_ij k_j              cap' is the slope of the softcap
//   dK_j     = scale Σ_i ds_ij cap'_ij q_i
//   dV_j     = Σ_i W_ij dout_i
//   dmask_ij = ds_ij, dslope = Σ_ij ds_ij · (−|distance|), dsink = Σ_i P_sink,i (grad_sink_i − delta_i)
//
// Every result is computed by one owner from start to end: a query row, a key row or a mask element. Each of
// the three passes computes ds again. That costs time, but no sums pass between threads, so that the result
// does not depend on them, and only delta takes memory.
#include <algorithm>
#include <vector>

#include "formula.h"
#include "loops.h"

namespace selfattn::cpu::loops {

namespace {

// P and ds of one query and key.
template <class T>
struct ScoreGradient {
  T kept_weight = 0;  // P_ij keep_ij
  T score = 0;        // ds_ij
  T dot = 0;          // ds_ij cap'_ij scale: the gradient of q·k
};

template <class T>
struct Gradient {
  Formula<T> formula;
  const BackwardArguments& a;
  T* delta;

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return row_sum(b, h, i) != 0 && formula.sees(b, h, i, j);
  }

  ScoreGradient<T> at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const AttentionParams& p = formula.p;
    const T scaled_dot = formula.scaled_dot(b, h, i, j);
    const T score = formula.score(b, h, i, j, scaled_dot);
    const T weight = formula.exponential(score, row_max(b, h, i)) / row_sum(b, h, i);
    const T keep = formula.keep(b, h, i, j);

    double sum = a.grad_weights.data != nullptr ? load<double>(a.grad_weights, b, h, i, j) : 0.0;
    for (int64_t e = 0; e < p.value_dim; ++e) {
      sum += load<double>(a.grad_out, b, h, i, e) * load<double>(p.value, b, p.kv_head(h), j, e);
    }
    const T grad_weight = static_cast<T>(sum);

    ScoreGradient<T> gradient;
    gradient.kept_weight = weight * keep;
    // A weight of 0 has no gradient, whatever else is not finite.
    if (weight != 0) {
      T grad_of_weight = grad_weight * keep - delta[(b * p.heads + h) * p.queries + i];
      if (a.grad_mean != nullptr) {
        const T grad_mean = static_cast<const T*>(a.grad_mean)[p.row(b, h, i)];
        grad_of_weight += grad_mean * (score - row_max(b, h, i));
      }
      if (a.grad_keys != nullptr) grad_of_weight += static_cast<const T*>(a.grad_keys)[p.key_place(b, h, j)];
      gradient.score = weight * grad_of_weight;
    }
    gradient.dot = gradient.score * formula.softcap_slope(scaled_dot) * static_cast<T>(p.scale);
    return gradient;
  }

  T row_max(int64_t b, int64_t h, int64_t i) const {
    return static_cast<const T*>(a.row_max)[formula.p.row(b, h, i)];
  }
  T row_sum(int64_t b, int64_t h, int64_t i) const {
    return static_cast<const T*>(a.row_sum)[formula.p.row(b, h, i)];
  }
};

// Computes delta, and the gradient of the sink.
template <class T>
struct DeltaTask {
  Gradient<T> gradient;

  using Scratch = NoScratch;

  void operator()(int64_t item, Scratch&) const {
    const Formula<T>& formula = gradient.formula;
    const BackwardArguments& a = gradient.a;
    const auto [b, h, i] = RowIndex(item, formula.p.heads, formula.p.queries);
    const int64_t row = formula.p.row(b, h, i);

    double sum = a.grad_row != nullptr ? static_cast<const T*>(a.grad_row)[row] : T(0);
    for (int64_t e = 0; e < formula.p.value_dim; ++e) {
      double out = load<double>(a.out, b, h, i, e);
      if (a.out_residual.data != nullptr) out += load<double>(a.out_residual, b, h, i, e);
      sum += load<double>(a.grad_out, b, h, i, e) * out;
    }
    const T delta = static_cast<T>(sum);
    gradient.delta[item] = delta;

    if (a.grad_sinks_rows != nullptr) {
      const T sink = formula.exponential(formula.sink(b, h), gradient.row_max(b, h, i));
      const T grad_sink = a.grad_sink != nullptr ? static_cast<const T*>(a.grad_sink)[row] : T(0);
      static_cast<T*>(a.grad_sinks_rows)[row] =
          sink == 0 ? T(0) : sink / gradient.row_sum(b, h, i) * (grad_sink - delta);
    }
  }
};

// Computes one row of dQ, and its share of the slope's gradient.
template <class T>
struct QueryTask {
  Gradient<T> gradient;

  struct Scratch {
    std::vector<double> grad_query;
    explicit Scratch(const QueryTask& task)
        : grad_query(static_cast<size_t>(task.gradient.formula.p.head_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = gradient.formula.p;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);

    double grad_slope = 0;
    std::fill(scratch.grad_query.begin(), scratch.grad_query.end(), 0.0);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!gradient.sees(b, h, i, j)) continue;
      const ScoreGradient<T> g = gradient.at(b, h, i, j);
      grad_slope += static_cast<double>(g.score) * gradient.formula.distance_bias(i, j);
      for (int64_t e = 0; e < p.head_dim; ++e) {
        scratch.grad_query[e] += static_cast<double>(g.dot) * load<double>(p.key, b, p.kv_head(h), j, e);
      }
    }

    for (int64_t e = 0; e < p.head_dim; ++e)
      store<T>(gradient.a.grad_query, b, h, i, e, static_cast<T>(scratch.grad_query[e]));
    if (gradient.a.grad_slopes_rows != nullptr)
      static_cast<T*>(gradient.a.grad_slopes_rows)[p.row(b, h, i)] = static_cast<T>(grad_slope);
  }
};

// Computes one row of dK and of dV, over all the query heads that share it.
template <class T>
struct KeyTask {
  Gradient<T> gradient;

  struct Scratch {
    std::vector<double> grad_key;
    std::vector<double> grad_value;
    explicit Scratch(const KeyTask& task)
        : grad_key(static_cast<size_t>(task.gradient.formula.p.head_dim)),
          grad_value(static_cast<size_t>(task.gradient.formula.p.value_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = gradient.formula.p;
    const BackwardArguments& a = gradient.a;
    const auto [b, kv_head, j] = RowIndex(item, p.kv_heads, p.keys);
    const int64_t group = p.heads / p.kv_heads;

    std::fill(scratch.grad_key.begin(), scratch.grad_key.end(), 0.0);
    std::fill(scratch.grad_value.begin(), scratch.grad_value.end(), 0.0);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      for (int64_t i = 0; i < p.queries; ++i) {
        if (!gradient.sees(b, h, i, j)) continue;
        const ScoreGradient<T> g = gradient.at(b, h, i, j);
        for (int64_t e = 0; e < p.head_dim; ++e) {
          scratch.grad_key[e] += static_cast<double>(g.dot) * load<double>(p.query, b, h, i, e);
        }
        for (int64_t e = 0; e < p.value_dim; ++e) {
          scratch.grad_value[e] += static_cast<double>(g.kept_weight) * load<double>(a.grad_out, b, h, i, e);
        }
      }
    }

    for (int64_t e = 0; e < p.head_dim; ++e)
      store<T>(a.grad_key, b, kv_head, j, e, static_cast<T>(scratch.grad_key[e]));
    for (int64_t e = 0; e < p.value_dim; ++e)
      store<T>(a.grad_value, b, kv_head, j, e, static_cast<T>(scratch.grad_value[e]));
  }
};

// Computes one element of the mask's gradient, summed over the dimensions along which that element was
// broadcast. The sum is in float64, because a row of ds adds up to 0: rounding errors could be all that is
// left of it.
template <class T>
struct MaskTask {
  Gradient<T> gradient;
  int64_t size[4];  // the mask's own sizes

  explicit MaskTask(const Gradient<T>& g) : gradient(g) {
    const AttentionParams& p = g.formula.p;
    const int64_t full[4] = {p.batch, p.heads, p.queries, p.keys};
    for (int d = 0; d < 4; ++d) size[d] = g.a.grad_mask.stride[d] == 0 ? 1 : full[d];
  }

  using Scratch = NoScratch;

  int64_t items() const { return size[0] * size[1] * size[2] * size[3]; }

  void operator()(int64_t item, Scratch&) const {
    const AttentionParams& p = gradient.formula.p;
    const View& grad_mask = gradient.a.grad_mask;
    const int64_t column = item % size[3];
    const RowIndex row(item / size[3], size[1], size[2]);

    double sum = 0;
    for (int64_t b = row.b; b < p.batch; b += size[0]) {
      for (int64_t h = row.h; h < p.heads; h += size[1]) {
        for (int64_t i = row.i; i < p.queries; i += size[2]) {
          for (int64_t j = column; j < p.keys; j += size[3]) {
            if (gradient.sees(b, h, i, j)) sum += static_cast<double>(gradient.at(b, h, i, j).score);
          }
        }
      }
    }
    // Sequences of a packed batch may share the mask: each call adds to what the calls before it have left.
    sum += load<double>(grad_mask, row.b, row.h, row.i, column);
    store<double>(grad_mask, row.b, row.h, row.i, column, sum);
  }
};

template <class T>
void backward_as(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  const Gradient<T> gradient{Formula<T>(p), a, static_cast<T*>(a.workspace)};
  for_each_item(pool, p.batch * p.heads * p.queries, DeltaTask<T>{gradient});
  for_each_item(pool, p.batch * p.heads * p.queries, QueryTask<T>{gradient});
  for_each_item(pool, p.batch * p.kv_heads * p.keys, KeyTask<T>{gradient});
  if (a.grad_mask.data != nullptr) {
    const MaskTask<T> task(gradient);
    for_each_item(pool, task.items(), task);
  }
}

}  // namespace

size_t backward_workspace(const AttentionParams& p) {
  const size_t rows = static_cast<size_t>(p.batch * p.heads * p.queries);
  return rows * (p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
}

void backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? backward_as<double>(p, a, pool) : backward_as<float>(p, a, pool);
}

}  // namespace selfattn::cpu::loops
