// Second derivatives: the gradients of F = Σ dout·tout − Σ grad_row·tlse (Note [Second derivatives] in
// core/tangents.h). With dP, delta, ds as in loops_backward.cpp and T, m as in score_tangent.h:
//
//   U_ij  = keep_ij Σ_e dout_ie tv_je                    dP_ij = keep_ij Σ_e dout_ie v_je
//   A_ij  = dP_ij (T_ij − m_i) − delta_i T_ij + U_ij      of a sink, which has no value: −delta_i tsink
//   c_i   = Σ_j P_ij A_ij
//   g_ij  = P_ij (A_ij − c_i)                             the gradient of the finished score
//   x_ij  = cap'_ij g_ij + cap''_ij ds_ij Tdot_ij         that of the scaled dot product
//   gq_i  = scale Σ_j (x_ij k_j + cap'_ij ds_ij tk_j),    gk_j = scale Σ_i (x_ij q_i + cap'_ij ds_ij tq_i)
//   gv_j  = Σ_i keep_ij P_ij (T_ij − m_i) dout_i,         gmask_ij = g_ij, and so on
//
// As in the backward, every result has one owner, and each pass works g out anew.
#include <algorithm>
#include <vector>

#include "loops.h"
#include "mask_task.h"
#include "score_tangent.h"

namespace selfattn::cpu::loops {

namespace {

// Of one query.
template <class T>
struct RowNumbers {
  T delta, mean, correction;  // delta_i, m_i, c_i
};

// Of one query and key.
template <class T>
struct SecondGradient {
  T kept_deviation = 0;  // keep_ij P_ij (T_ij − m_i)
  T score = 0;           // g_ij
  T dot = 0;             // scale x_ij
  T first_dot = 0;       // scale cap'_ij ds_ij
};

template <class T>
struct Second {
  RowTangent<T> row;
  const BackwardBackwardArguments& a;
  RowNumbers<T>* numbers;

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const { return row.sees(b, h, i, j); }
  const Formula<T>& formula() const { return row.tangent.formula; }
  const AttentionParams& p() const { return formula().p; }
  const RowNumbers<T>& numbers_of(int64_t b, int64_t h, int64_t i) const {
    return numbers[(b * p().heads + h) * p().queries + i];
  }

  // A_ij and what it is made of; g_ij needs c_i.
  struct Parts {
    T weight, keep, dot, dot_tangent, score_tangent, grad_weight, a;
  };
  Parts parts(int64_t b, int64_t h, int64_t i, int64_t j, T delta, T mean) const {
    Parts x;
    x.dot = formula().scaled_dot(b, h, i, j);
    x.weight = row.weight(b, h, i, formula().score(b, h, i, j, x.dot));
    x.keep = formula().keep(b, h, i, j);
    x.dot_tangent = row.tangent.of_dot(b, h, i, j);
    x.score_tangent = row.tangent.of_score(b, h, i, j, x.dot, x.dot_tangent);
    double of_value = 0, of_tangent = 0;
    for (int64_t e = 0; e < p().value_dim; ++e) {
      const double grad = load<double>(a.backward.grad_out, b, h, i, e);
      of_value += grad * load<double>(p().value, b, p().kv_head(h), j, e);
      of_tangent += grad * row.tangent.of_value(b, h, j, e);
    }
    x.grad_weight = static_cast<T>(of_value) * x.keep;
    x.a = x.grad_weight * (x.score_tangent - mean) - delta * x.score_tangent +
          static_cast<T>(of_tangent) * x.keep;
    return x;
  }

  SecondGradient<T> at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const RowNumbers<T>& n = numbers_of(b, h, i);
    const Parts x = parts(b, h, i, j, n.delta, n.mean);
    SecondGradient<T> g;
    if (x.weight == 0) return g;
    const T scale = static_cast<T>(p().scale), slope = formula().softcap_slope(x.dot);
    const T first = x.weight * (x.grad_weight - n.delta);  // ds_ij
    g.kept_deviation = x.keep * x.weight * (x.score_tangent - n.mean);
    g.score = x.weight * (x.a - n.correction);
    g.dot = scale * (slope * g.score + formula().softcap_curvature(x.dot) * first * x.dot_tangent);
    g.first_dot = scale * slope * first;
    return g;
  }
};

// The numbers of a row, what does without g, and the gradient of the sink.
template <class T>
struct RowTask {
  Second<T> second;

  struct Scratch {
    std::vector<double> out;
    explicit Scratch(const RowTask& task) : out(static_cast<size_t>(task.second.p().value_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = second.p();
    const BackwardArguments& a = second.a.backward;
    const RowTangent<T>& row = second.row;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    const int64_t at = p.row(b, h, i);
    const bool nothing = static_cast<const T*>(a.row_sum)[at] == 0;

    double sum = a.grad_row != nullptr ? static_cast<const T*>(a.grad_row)[at] : T(0);
    for (int64_t e = 0; e < p.value_dim; ++e) {
      double out = load<double>(a.out, b, h, i, e);
      if (a.out_residual.data != nullptr) out += load<double>(a.out_residual, b, h, i, e);
      sum += load<double>(a.grad_out, b, h, i, e) * out;
    }
    RowNumbers<T> n{static_cast<T>(sum), nothing ? T(0) : row.mean(b, h, i), T(0)};

    const T sink_weight = nothing ? T(0) : row.sink_weight(b, h, i);
    const T of_sink = -n.delta * row.tangent.of_sink(b, h);
    double correction = sink_weight != 0 ? static_cast<double>(sink_weight) * of_sink : 0.0;
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!row.sees(b, h, i, j)) continue;
      const auto x = second.parts(b, h, i, j, n.delta, n.mean);
      if (x.weight != 0) correction += static_cast<double>(x.weight) * x.a;
    }
    n.correction = static_cast<T>(correction);
    second.numbers[item] = n;

    row.store_out(b, h, i, n.mean, scratch.out.data(), second.a.tangent_out);
    static_cast<T*>(second.a.tangent_lse)[at] = n.mean;
    if (a.grad_sinks_rows != nullptr) {
      static_cast<T*>(a.grad_sinks_rows)[at] =
          sink_weight == 0 ? T(0) : sink_weight * (of_sink - n.correction);
    }
  }
};

// One row of gq, and its share of the slope's gradient.
template <class T>
struct QueryTask {
  Second<T> second;

  struct Scratch {
    std::vector<double> grad_query;
    explicit Scratch(const QueryTask& task) : grad_query(static_cast<size_t>(task.second.p().head_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = second.p();
    const BackwardArguments& a = second.a.backward;
    const View& tangent_key = second.a.tangents.key;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);

    double grad_slope = 0;
    std::fill(scratch.grad_query.begin(), scratch.grad_query.end(), 0.0);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!second.sees(b, h, i, j)) continue;
      const SecondGradient<T> g = second.at(b, h, i, j);
      grad_slope += static_cast<double>(g.score) * second.formula().distance_bias(i, j);
      for (int64_t e = 0; e < p.head_dim; ++e) {
        scratch.grad_query[e] += static_cast<double>(g.dot) * load<double>(p.key, b, p.kv_head(h), j, e);
        if (tangent_key.data == nullptr) continue;
        scratch.grad_query[e] +=
            static_cast<double>(g.first_dot) * load<double>(tangent_key, b, p.kv_head(h), j, e);
      }
    }

    for (int64_t e = 0; e < p.head_dim; ++e)
      store<T>(a.grad_query, b, h, i, e, static_cast<T>(scratch.grad_query[e]));
    if (a.grad_slopes_rows != nullptr)
      static_cast<T*>(a.grad_slopes_rows)[p.row(b, h, i)] = static_cast<T>(grad_slope);
  }
};

// One row of gk and of gv, over all the query heads that share it.
template <class T>
struct KeyTask {
  Second<T> second;

  struct Scratch {
    std::vector<double> grad_key, grad_value;
    explicit Scratch(const KeyTask& task)
        : grad_key(static_cast<size_t>(task.second.p().head_dim)),
          grad_value(static_cast<size_t>(task.second.p().value_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = second.p();
    const BackwardArguments& a = second.a.backward;
    const View& tangent_query = second.a.tangents.query;
    const auto [b, kv_head, j] = RowIndex(item, p.kv_heads, p.keys);
    const int64_t group = p.heads / p.kv_heads;

    std::fill(scratch.grad_key.begin(), scratch.grad_key.end(), 0.0);
    std::fill(scratch.grad_value.begin(), scratch.grad_value.end(), 0.0);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      for (int64_t i = 0; i < p.queries; ++i) {
        if (!second.sees(b, h, i, j)) continue;
        const SecondGradient<T> g = second.at(b, h, i, j);
        for (int64_t e = 0; e < p.head_dim; ++e) {
          scratch.grad_key[e] += static_cast<double>(g.dot) * load<double>(p.query, b, h, i, e);
          if (tangent_query.data == nullptr) continue;
          scratch.grad_key[e] += static_cast<double>(g.first_dot) * load<double>(tangent_query, b, h, i, e);
        }
        for (int64_t e = 0; e < p.value_dim; ++e) {
          scratch.grad_value[e] +=
              static_cast<double>(g.kept_deviation) * load<double>(a.grad_out, b, h, i, e);
        }
      }
    }

    for (int64_t e = 0; e < p.head_dim; ++e)
      store<T>(a.grad_key, b, kv_head, j, e, static_cast<T>(scratch.grad_key[e]));
    for (int64_t e = 0; e < p.value_dim; ++e)
      store<T>(a.grad_value, b, kv_head, j, e, static_cast<T>(scratch.grad_value[e]));
  }
};

template <class T>
void backward_backward_as(const AttentionParams& p, const BackwardBackwardArguments& a,
                          const ThreadPool& pool) {
  const Second<T> second{{{Formula<T>(p), a.tangents}, a.backward.row_max, a.backward.row_sum},
                         a,
                         static_cast<RowNumbers<T>*>(a.backward.workspace)};
  for_each_item(pool, p.batch * p.heads * p.queries, RowTask<T>{second});
  for_each_item(pool, p.batch * p.heads * p.queries, QueryTask<T>{second});
  for_each_item(pool, p.batch * p.kv_heads * p.keys, KeyTask<T>{second});
  if (a.backward.grad_mask.data != nullptr) {
    const MaskTask<Second<T>> task(second, p, a.backward.grad_mask);
    for_each_item(pool, task.items(), task);
  }
}

}  // namespace

size_t backward_backward_workspace(const AttentionParams& p) {
  const size_t rows = static_cast<size_t>(p.batch * p.heads * p.queries);
  return rows * (p.dtype == DType::kFloat64 ? sizeof(RowNumbers<double>) : sizeof(RowNumbers<float>));
}

void backward_backward(const AttentionParams& p, const BackwardBackwardArguments& a, const ThreadPool& pool) {
  p.dtype == DType::kFloat64 ? backward_backward_as<double>(p, a, pool)
                             : backward_backward_as<float>(p, a, pool);
}

}  // namespace selfattn::cpu::loops
