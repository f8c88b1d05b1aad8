// The tangent of one score: with t the direction (core/tangents.h) and cap' the slope of the softcap,
//
//   T_ij = cap'_ij scale (tq_i·k_j + q_i·tk_j) − tslope |i + offset − j| + tmask_ij
#pragma once

#include "../../core/tangents.h"
#include "formula.h"

namespace selfattn::cpu::loops {

template <class T>
struct ScoreTangent {
  Formula<T> formula;
  const Tangents& t;

  // Of the scaled dot product.
  T of_dot(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const AttentionParams& p = formula.p;
    double sum = 0;
    for (int64_t e = 0; e < p.head_dim; ++e) {
      if (t.query.data != nullptr) {
        sum += load<double>(t.query, b, h, i, e) * load_key<double>(p, p.key, b, p.kv_head(h), j, e);
      }
      if (t.key.data != nullptr) {
        sum += load<double>(p.query, b, h, i, e) * load_key<double>(p, t.key, b, p.kv_head(h), j, e);
      }
    }
    return static_cast<T>(p.scale * sum);
  }

  // Of the finished score, from the dot product and its tangent.
  T of_score(int64_t b, int64_t h, int64_t i, int64_t j, T scaled_dot, T tangent_of_dot) const {
    T sum = formula.softcap_slope(scaled_dot) * tangent_of_dot;
    if (t.alibi_slopes.data != nullptr)
      sum += formula.coefficient(t.alibi_slopes, b, h) * formula.distance_bias(i, j);
    if (t.mask.data != nullptr) sum += load<T>(t.mask, b, h, i, j);
    return sum;
  }
  T operator()(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return of_score(b, h, i, j, formula.scaled_dot(b, h, i, j), of_dot(b, h, i, j));
  }

  T of_sink(int64_t b, int64_t h) const {
    return t.sinks.data != nullptr ? formula.coefficient(t.sinks, b, h) : T(0);
  }

  // Of a value.
  double of_value(int64_t b, int64_t h, int64_t j, int64_t e) const {
    const AttentionParams& p = formula.p;
    return t.value.data != nullptr ? load_key<double>(p, t.value, b, p.kv_head(h), j, e) : 0.0;
  }
};

// What the tangents of a row are made of: P_ij, m_i = Σ_j P_ij T_ij, and from these tout_i and tlse_i = m_i.
template <class T>
struct RowTangent {
  ScoreTangent<T> tangent;
  const void *row_max, *row_sum;

  T weight(int64_t b, int64_t h, int64_t i, T score) const {
    const int64_t row = tangent.formula.p.row(b, h, i);
    return Formula<T>::exponential(score, static_cast<const T*>(row_max)[row]) /
           static_cast<const T*>(row_sum)[row];
  }
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Formula<T>& formula = tangent.formula;
    return static_cast<const T*>(row_sum)[formula.p.row(b, h, i)] != 0 && formula.sees(b, h, i, j);
  }
  // Of the sink; 0 where nothing is seen and where there is none.
  T sink_weight(int64_t b, int64_t h, int64_t i) const {
    const T sink = tangent.formula.sink(b, h);
    return sink == -std::numeric_limits<T>::infinity() ? T(0) : weight(b, h, i, sink);
  }

  // Σ_j P_ij T_ij, the sink included.
  T mean(int64_t b, int64_t h, int64_t i) const {
    const Formula<T>& formula = tangent.formula;
    double sum = static_cast<double>(sink_weight(b, h, i)) * tangent.of_sink(b, h);
    for (int64_t j = 0; j < formula.p.keys; ++j) {
      if (!sees(b, h, i, j)) continue;
      const T w = weight(b, h, i, formula.score(b, h, i, j));
      if (w != 0) sum += static_cast<double>(w) * tangent(b, h, i, j);
    }
    return static_cast<T>(sum);
  }

  // tout_i = Σ_j keep_ij P_ij ((T_ij − m_i) v_j + tv_j); `sums` has room for a row.
  void store_out(int64_t b, int64_t h, int64_t i, T mean, double* sums, const View& tangent_out) const {
    const Formula<T>& formula = tangent.formula;
    const AttentionParams& p = formula.p;
    for (int64_t e = 0; e < p.value_dim; ++e) sums[e] = 0;
    for (int64_t j = 0; j < p.keys; ++j) {
      if (!sees(b, h, i, j)) continue;
      const T w = weight(b, h, i, formula.score(b, h, i, j)) * formula.keep(b, h, i, j);
      const T deviation = w != 0 ? tangent(b, h, i, j) - mean : T(0);
      for (int64_t e = 0; e < p.value_dim; ++e) {
        const double value = load_key<double>(p, p.value, b, p.kv_head(h), j, e);
        sums[e] += static_cast<double>(w) * (deviation * value + tangent.of_value(b, h, j, e));
      }
    }
    for (int64_t e = 0; e < p.value_dim; ++e) store<T>(tangent_out, b, h, i, e, static_cast<T>(sums[e]));
  }
};

}  // namespace selfattn::cpu::loops
