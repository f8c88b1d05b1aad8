// What every pass of the backward shares: a strip of queries with its incoming gradient, and the block of
// d(score) that follows from it. With P = softmax weights, dP = dO V^T (+ the gradient of returned weights),
// and delta = rowsum(P * dP) = rowsum(dO * O), the gradient of the scores is dS = P * (dP - delta).
#pragma once

#include "forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct GradientStrip : QueryStrip<T> {
  T* grad_out_t;  // [value_dim][kLanes] dO^T
  T* out_t;       // [value_dim][kLanes] O^T, and its residual
  T* residual_t;
  T* delta;        // [kLanes]
  T* row_max;      // [kLanes] 0 where the row sees nothing, so that -inf scores give weights of 0 and not NaN
  T* inverse_sum;  // [kLanes] 0 where the row sees nothing

  static int64_t bytes(const AttentionParams& p) {
    return Arena::bytes_for<T>(QueryStrip<T>::query_size(p)) +
           3 * Arena::bytes_for<T>(p.value_dim * kLanes<T>) + 3 * Arena::bytes_for<T>(kLanes<T>);
  }
  void allocate(const AttentionParams& p, Arena& arena) {
    this->query_t = arena.take<T>(QueryStrip<T>::query_size(p));
    grad_out_t = arena.take<T>(p.value_dim * kLanes<T>);
    out_t = arena.take<T>(p.value_dim * kLanes<T>);
    residual_t = arena.take<T>(p.value_dim * kLanes<T>);
    delta = arena.take<T>(kLanes<T>);
    row_max = arena.take<T>(kLanes<T>);
    inverse_sum = arena.take<T>(kLanes<T>);
  }

  int64_t row(const AttentionParams& p) const {
    return (this->batch * p.heads + this->head) * p.queries + this->first;
  }

  void begin_gradient(const AttentionParams& p, const BackwardArguments& a, int64_t batch, int64_t head,
                      int64_t first, int64_t count) {
    using S = Simd<T>;
    this->begin(p, batch, head, first, count);
    load_strip(p, a.grad_out, grad_out_t);
    load_strip(p, a.out, out_t);
    const bool residual = a.out_residual.data != nullptr;
    if (residual) load_strip(p, a.out_residual, residual_t);
    const T* maxima = static_cast<const T*>(a.row_max) + row(p);
    const T* sums = static_cast<const T*>(a.row_sum) + row(p);
    const T* grad_row = a.grad_row != nullptr ? static_cast<const T*>(a.grad_row) + row(p) : nullptr;
    // One multiply-add after another, as in the product dP = dO * V^T: where a row sees a single key, O is
    // that key's value, both sums round alike, and dP - delta is exactly 0.
    for (int64_t lane = 0; lane < this->vecs * S::kWidth; lane += S::kWidth) {
      auto sum = S::set(T(0));
      for (int64_t e = 0; e < p.value_dim; ++e) {
        auto out = S::load(out_t + e * kLanes<T> + lane);
        if (residual) out = S::add(out, S::load(residual_t + e * kLanes<T> + lane));
        sum = S::fma(out, S::load(grad_out_t + e * kLanes<T> + lane), sum);
      }
      S::store(delta + lane, sum);
    }
    for (int64_t lane = 0; lane < this->vecs * S::kWidth; ++lane) {
      const bool past_last = lane >= count;
      if (!past_last && grad_row != nullptr) delta[lane] += grad_row[lane];
      const bool nothing = past_last || maxima[lane] == -std::numeric_limits<T>::infinity();
      row_max[lane] = nothing ? T(0) : maxima[lane];
      inverse_sum[lane] = past_last || sums[lane] == T(0) ? T(0) : T(1) / sums[lane];
    }
  }

 private:
  void load_strip(const AttentionParams& p, const View& view, T* transposed) const {
    const void* source = element(view.data, p.dtype, view.offset(this->batch, this->head, this->first));
    load_transposed<T>(transposed, kLanes<T>, source, p.dtype, view.stride[2], this->count, p.value_dim,
                       T(1));
  }
};

// Scratch of one block of the backward.
template <class T>
struct GradientScratch {
  BlockScratch<T> block;
  T* weights;  // [kKeyBlock][kLanes] P^T, after dropout once grad_score_block returns
  T* grad;     // [kKeyBlock][kLanes] dS^T with respect to the final scores, before the softcap's factor
  T* visible;  // [kKeyBlock][kLanes] see multiply_visible

  static int64_t bytes() {
    return BlockScratch<T>::bytes(true) + 3 * Arena::bytes_for<T>(kKeyBlock * kLanes<T>);
  }
  explicit GradientScratch(Arena& arena)
      : block(arena, true),
        weights(arena.take<T>(kKeyBlock * kLanes<T>)),
        grad(arena.take<T>(kKeyBlock * kLanes<T>)),
        visible(arena.take<T>(kKeyBlock * kLanes<T>)) {}
};

// Normalised weights of a block in place of its scores.
template <class T>
void normalise_block(const QueryStrip<T>& strip, int64_t keys, const T* row_max, const T* inverse_sum, T* s) {
  using S = Simd<T>;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      T* at = s + j * kLanes<T> + lane;
      const auto weight = exp_nonpositive<T>(S::sub(S::load(at), S::load(row_max + lane)));
      S::store(at, S::mul(weight, S::load(inverse_sum + lane)));
    }
  }
}

// Fills scratch.weights and scratch.grad for keys key .. key + keys - 1; false when the mask hides them all.
template <class T>
bool grad_score_block(const AttentionParams& p, const BackwardArguments& a, const GradientStrip<T>& strip,
                      int64_t key, int64_t keys, const Rows<T>& key_rows, const Rows<T>& value_rows,
                      const GradientScratch<T>& scratch, bool need_visible) {
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const int64_t lanes = strip.vecs * S::kWidth;
  if (!score_block<T>(p, strip, key, keys, key_rows, scratch.block, scratch.weights)) return false;
  if (need_visible) mark_visible<T>(strip, keys, scratch.weights, scratch.visible);
  normalise_block<T>(strip, keys, strip.row_max, strip.inverse_sum, scratch.weights);

  multiply<T, false>({p.value_dim, value_rows.data, value_rows.stride, strip.grad_out_t, ld, scratch.grad, ld,
                      Update::kStore, nullptr},
                     keys, strip.vecs);
  if (a.grad_weights.data != nullptr) {
    for (int64_t lane = 0; lane < strip.count; ++lane) {
      const View& g = a.grad_weights;
      const int64_t at = g.offset(strip.batch, strip.head, strip.first + lane) + key * g.stride[3];
      for (int64_t j = 0; j < keys; ++j) {
        scratch.grad[j * ld + lane] += load_element<T>(g.data, g.dtype, at + j * g.stride[3]);
      }
    }
  }
  // Dropout scales dP as it scaled P. P itself is needed undropped for dS and dropped for dV: the dropped
  // weights wait in the mask's buffer, which has served its turn.
  T* dropped = scratch.block.mask;
  if (p.dropout.enabled) {
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t lane = 0; lane < lanes; lane += S::kWidth) S::store(dropped + j * ld + lane, S::set(T(1)));
    }
    apply_dropout<T>(p.dropout, strip, key, keys, dropped);
  }
  const auto zero = S::set(T(0));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < lanes; lane += S::kWidth) {
      const int64_t at = j * ld + lane;
      const auto weight = S::load(scratch.weights + at);
      auto grad = S::load(scratch.grad + at);
      if (p.dropout.enabled) {
        const auto factor = S::load(dropped + at);
        grad = S::mul(grad, factor);
        S::store(scratch.weights + at, S::mul(weight, factor));
      }
      grad = S::mul(weight, S::sub(grad, S::load(strip.delta + lane)));
      // A hidden key's dP may be NaN; its weight is 0 and so is its gradient.
      S::store(scratch.grad + at, S::select(S::equal(weight, zero), zero, grad));
    }
  }
  return true;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
