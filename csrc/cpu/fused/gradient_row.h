// The gradient of one row's softmax, with lanes over the keys: for the backwards of very few queries. Those
// of strips are in gradient_strip.h.
#pragma once

#include "../products/few_query_scores.h"
#include "decode_rows.h"
#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// This is what the gradient of a row's softmax needs; see GradientStrip.
template <class T>
struct GradientRow {
  T row_max, inverse_sum, delta, grad_mean;
};
template <class T>
GradientRow<T> gradient_row(T row_max, T row_sum, T delta) {
  return {row_max == -std::numeric_limits<T>::infinity() ? T(0) : row_max,
          row_sum == T(0) ? T(0) : T(1) / row_sum, delta, T(0)};
}

// Loads a row of queries and of dO, padded; `out` and `residual` are room for such a row. With kv heads in
// several chunks, one of them stores the gradient of the row's sink.
template <class T>
GradientRow<T> load_gradient_row(const AttentionParams& p, const BackwardArguments& a, const DecodeRow& at,
                                 bool stores_sink, T* query, T* grad_out, T* out, T* residual) {
  using S = Simd<T>;
  const auto load = [&](T* to, const View& view, int64_t columns, T factor) {
    load_padded_row<T>(to, element(view.data, p.dtype, view.offset(at.batch, at.head, at.query)), p.dtype,
                       columns, factor);
  };
  load(query, p.query, p.head_dim, static_cast<T>(p.scale));
  load(grad_out, a.grad_out, p.value_dim, T(1));
  load(out, a.out, p.value_dim, T(1));
  if (a.out_residual.data != nullptr) {
    load(residual, a.out_residual, p.value_dim, T(1));
    for (int64_t e = 0; e < p.value_dim; e += S::kWidth) {
      S::store(out + e, S::add(S::load(out + e), S::load(residual + e)));
    }
  }
  const int64_t index = p.row(at.batch, at.head, at.query);
  GradientRow<T> row =
      gradient_row(static_cast<const T*>(a.row_max)[index], static_cast<const T*>(a.row_sum)[index],
                   few_query_dot<T>(grad_out, out, p.value_dim));
  if (a.grad_row != nullptr) row.delta += static_cast<const T*>(a.grad_row)[index];
  if (a.grad_mean != nullptr) row.grad_mean = static_cast<const T*>(a.grad_mean)[index];
  if (stores_sink && a.grad_sinks_rows != nullptr) {
    static_cast<T*>(a.grad_sinks_rows)[index] = sink_gradient<T>(
        a, index, head_scalar<T>(p.sinks, at.batch, at.head), row.row_max, row.inverse_sum, row.delta);
  }
  return row;
}

// Turns scores into weights. If a row's sum is NaN, its hidden keys keep weights of 0.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec normalised_weight(typename Simd<T>::Vec score,
                                                        typename Simd<T>::Vec shift,
                                                        typename Simd<T>::Vec inverse) {
  using S = Simd<T>;
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  return S::select(S::equal(score, hidden), S::set(T(0)),
                   S::mul(exp_nonpositive<T>(S::sub(score, shift)), inverse));
}

// Options change a row's gradient by these, which have a number for each key; those that change nothing are
// nullptr.
template <class T>
struct GradientTerms {
  const T* keep = nullptr;      // factors of dropout
  const T* added = nullptr;     // what gradients of statistics add to dP
  const T* cap = nullptr;       // the softcap's derivative at the scores
  const T* distance = nullptr;  // from the query, if slopes have gradients
};

// Turns a row's scores into weights, and dP into dS, up to a whole vector. What lies past the last key is
// anything; its weight is not used. Returns the sum of dS times -distance.
template <class T>
T weigh_gradient_row(const GradientRow<T>& row, const GradientTerms<T>& terms, int64_t keys, T* weights,
                     T* grad) {
  using S = Simd<T>;
  const auto shift = S::set(row.row_max), inverse = S::set(row.inverse_sum), delta = S::set(row.delta);
  const auto zero = S::set(T(0));
  auto slope = zero;
  for (int64_t j = 0; j < keys; j += S::kWidth) {
    const auto weight = normalised_weight<T>(S::load(weights + j), shift, inverse);
    auto weight_grad = S::load(grad + j);
    if (terms.keep != nullptr) weight_grad = S::mul(weight_grad, S::load(terms.keep + j));
    if (terms.added != nullptr) weight_grad = S::add(weight_grad, S::load(terms.added + j));
    auto score_grad = score_gradient<T>(weight, weight_grad, delta);
    if (terms.distance != nullptr) slope = S::sub(slope, S::mul(S::load(terms.distance + j), score_grad));
    if (terms.cap != nullptr) {
      // If the gradient is 0, the key may be hidden and the factor NaN.
      const auto product = S::mul(score_grad, S::load(terms.cap + j));
      score_grad = S::select(S::equal(score_grad, zero), zero, product);
    }
    S::store(weights + j, terms.keep != nullptr ? S::mul(weight, S::load(terms.keep + j)) : weight);
    S::store(grad + j, score_grad);
  }
  return first_lane<T>(sum_of_lanes<T>(slope));
}

// Stores the softcap's derivative at some scores: 1 - tanh^2.
template <class T>
void keep_softcap_gradient(const AttentionParams& p, int64_t keys, const T* scores, T* cap) {
  using S = Simd<T>;
  const auto inverse_cap = S::set(static_cast<T>(1.0 / p.softcap)), one = S::set(T(1));
  for (int64_t j = 0; j < keys; j += S::kWidth) {
    const auto t = tanh<T>(S::mul(S::load(scores + j), inverse_cap));
    S::store(cap + j, S::sub(one, S::mul(t, t)));
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
