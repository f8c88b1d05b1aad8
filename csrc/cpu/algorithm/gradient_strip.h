// What every pass of the backward shares: a strip of queries with its incoming gradient, and the block of d(score) that
// follows from it. With P = softmax weights, dP = dO V^T (+ the gradient of returned weights), and
// delta = rowsum(P * dP) = rowsum(dO * O), the gradient of the scores is dS = P * (dP - delta).
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct GradientStrip : QueryStrip<T> {
  T* grad_out_t;   // [value_dim][kLanes] dO^T
  T* delta;        // [kLanes]
  T* row_max;      // [kLanes] 0 where the row sees nothing, so that -inf scores give weights of 0 and not NaN
  T* inverse_sum;  // [kLanes] 0 where the row sees nothing

  static int64_t bytes(const AttentionParams& p) {
    return Arena::bytes_for<T>(p.head_dim * kLanes<T>) + Arena::bytes_for<T>(p.value_dim * kLanes<T>) +
           3 * Arena::bytes_for<T>(kLanes<T>);
  }
  void allocate(const AttentionParams& p, Arena& arena) {
    this->query_t = arena.take<T>(p.head_dim * kLanes<T>);
    grad_out_t = arena.take<T>(p.value_dim * kLanes<T>);
    delta = arena.take<T>(kLanes<T>);
    row_max = arena.take<T>(kLanes<T>);
    inverse_sum = arena.take<T>(kLanes<T>);
  }

  int64_t row(const AttentionParams& p) const {
    return (this->batch * p.heads + this->head) * p.queries + this->first;
  }

  void begin_gradient(const AttentionParams& p, const BackwardArguments& a, int64_t batch, int64_t head, int64_t first,
                      int64_t count) {
    using S = Simd<T>;
    this->begin(p, batch, head, first, count);
    const void* grad_out = element(a.grad_out.data, p.dtype, a.grad_out.offset(batch, head, first));
    const void* out = element(a.out.data, p.dtype, a.out.offset(batch, head, first));
    load_transposed<T>(grad_out_t, kLanes<T>, grad_out, p.dtype, a.grad_out.stride[2], count, p.value_dim, T(1));
    const T* maxima = static_cast<const T*>(a.row_max) + row(p);
    const T* sums = static_cast<const T*>(a.row_sum) + row(p);
    const T* grad_row = a.grad_row != nullptr ? static_cast<const T*>(a.grad_row) + row(p) : nullptr;
    for (int64_t lane = 0; lane < this->vecs * S::kWidth; ++lane) {
      if (lane >= count) {
        delta[lane] = row_max[lane] = inverse_sum[lane] = T(0);
        continue;
      }
      auto sum = S::set(T(0));
      for (int64_t e = 0; e < p.value_dim; e += S::kWidth) {
        const auto g = load_row<T>(element(grad_out, p.dtype, lane * a.grad_out.stride[2] + e), p.dtype, p.value_dim - e);
        const auto o = load_row<T>(element(out, p.dtype, lane * a.out.stride[2] + e), p.dtype, p.value_dim - e);
        sum = S::fma(g, o, sum);
      }
      T parts[S::kWidth];
      S::store(parts, sum);
      delta[lane] = grad_row != nullptr ? grad_row[lane] : T(0);
      for (int i = 0; i < S::kWidth; ++i) delta[lane] += parts[i];
      const bool nothing = maxima[lane] == -std::numeric_limits<T>::infinity();
      row_max[lane] = nothing ? T(0) : maxima[lane];
      inverse_sum[lane] = sums[lane] == T(0) ? T(0) : T(1) / sums[lane];
    }
  }
};

// Scratch of one block of the backward.
template <class T>
struct GradientScratch {
  BlockScratch<T> block;
  T* weights;  // [kKeyBlock][kLanes] P^T, after dropout once grad_score_block returns
  T* grad;     // [kKeyBlock][kLanes] dS^T with respect to the final scores, before the softcap's factor
  T* visible;  // [kKeyBlock][kLanes] see multiply_visible

  static int64_t bytes() { return BlockScratch<T>::bytes(true) + 3 * Arena::bytes_for<T>(kKeyBlock * kLanes<T>); }
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
bool grad_score_block(const AttentionParams& p, const BackwardArguments& a, const GradientStrip<T>& strip, int64_t key,
                      int64_t keys, const Rows<T>& key_rows, const Rows<T>& value_rows, const GradientScratch<T>& scratch,
                      bool need_visible) {
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
  // Dropout scales dP as it scaled P. P itself is needed undropped for dS and dropped for dV: the dropped weights wait in
  // the mask's buffer, which has served its turn.
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
