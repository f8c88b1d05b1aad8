// A strip of queries with its incoming gradient, and the block of dS that follows from it. Every pass of the
// backward shares them. With P the softmax weights, dP = dO V^T (+ the gradient of returned weights), and
// delta = rowsum(P * dP) = rowsum(dO * O), the gradient of the scores is dS = P * (dP - delta). Gradients of
// statistics add to dP, see Note [Statistics of scores] in core/attention_params.h.
#pragma once

#include "delta.h"
#include "forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
struct GradientStrip : QueryStrip<P> {
  using T = Scalar<P>;

  LaneOperand<P> grad_out;
  T* tail_grad_out;  // [kMostTail][padded value_dim] the tail's rows of it
  Delta<P> delta_sum;
  T* delta;        // [kLanes]
  T* row_max;      // [kLanes] 0 where the row sees nothing, so that -inf scores give weights of 0 and not NaN
  T* inverse_sum;  // [kLanes] 0 where the row sees nothing
  T* grad_mean;    // [kLanes] if the call has it
  bool ordinary;   // whether inverse_sum holds no NaN

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    QueryStrip<P>::allocate(p, arena);
    grad_out.allocate(p, p.value_dim, arena);
    tail_grad_out = arena.take<T>(kMostTail<P> * round_up_to_vector<T>(p.value_dim));
    delta_sum.allocate(p, arena);
    delta = arena.take<T>(kLanes<P>);
    row_max = arena.take<T>(kLanes<P>);
    inverse_sum = arena.take<T>(kLanes<P>);
    grad_mean = arena.take<T>(kLanes<P>);
  }

  // Returns the lanes (1, or 0) whose dS may hold numbers that have no pieces, nullptr if there are none. dS
  // is as small or as large as dO and the values, which decide: looking at dS itself would make a row depend
  // on keys hidden from it.
  const float* gradients_in_float() const { return delta_sum.any_special ? delta_sum.is_special : nullptr; }

  int64_t row(const AttentionParams& p) const { return p.row(this->batch, this->head, this->first); }

  SELFATTN_OUT_OF_LINE void begin_gradient(const AttentionParams& p, const BackwardArguments& a,
                                           int64_t batch, int64_t head, int64_t first, int64_t count) {
    this->begin(p, batch, head, first, count);
    grad_out.load(this->source(p, a.grad_out, p.value_dim).as_gradient());
    RowSource residual{};
    if (a.out_residual.data != nullptr) residual = this->source(p, a.out_residual, p.value_dim);
    delta_sum.compute(this->source(p, a.out, p.value_dim), residual, grad_out, this->vecs, delta);
    if constexpr (kMostTail<P> > 0) {
      if (this->lanes < count) tail_deltas(p, a);
    }

    const T* maxima = static_cast<const T*>(a.row_max) + row(p);
    const T* sums = static_cast<const T*>(a.row_sum) + row(p);
    const T* grad_row = a.grad_row != nullptr ? static_cast<const T*>(a.grad_row) + row(p) : nullptr;
    ordinary = true;
    for (int64_t lane = 0; lane < this->vecs * Simd<T>::kWidth; ++lane) {
      const bool past_last = lane >= count;
      if (!past_last && grad_row != nullptr) delta[lane] += grad_row[lane];
      const bool nothing = past_last || maxima[lane] == -std::numeric_limits<T>::infinity();
      row_max[lane] = nothing ? T(0) : maxima[lane];
      inverse_sum[lane] = past_last || sums[lane] == T(0) ? T(0) : T(1) / sums[lane];
      ordinary &= inverse_sum[lane] == inverse_sum[lane];
    }
    if (a.grad_mean != nullptr) {
      const T* grads = static_cast<const T*>(a.grad_mean) + row(p);
      for (int64_t lane = 0; lane < this->vecs * Simd<T>::kWidth; ++lane) {
        grad_mean[lane] = lane < count ? grads[lane] : T(0);
      }
    }
  }

 private:
  // Computes the tail's deltas by the products that its dP takes, see Delta.
  SELFATTN_OUT_OF_LINE void tail_deltas(const AttentionParams& p, const BackwardArguments& a) {
    const int64_t padded = round_up_to_vector<T>(p.value_dim);
    T* const out = this->tail_product;
    this->load_tail(this->source(p, a.grad_out, p.value_dim), T(1), tail_grad_out);
    this->load_tail(this->source(p, a.out, p.value_dim), T(1), out);
    for (int64_t row = 0; row < this->count - this->lanes; ++row) {
      if (a.out_residual.data != nullptr) {
        const View& rest = a.out_residual;
        const int64_t at = rest.offset(this->batch, this->head, this->first + this->lanes + row);
        for (int64_t e = 0; e < p.value_dim; ++e) {
          out[row * padded + e] += load_element<T>(rest.data, p.dtype, at + e);
        }
      }
      delta[this->lanes + row] =
          few_query_dot<T>(tail_grad_out + row * padded, out + row * padded, p.value_dim);
    }
  }
};

// The scratch of one block of the backward.
template <class P>
struct GradientScratch {
  using T = Scalar<P>;

  BlockScratch<P> block;
  WeightOperand<P> weights;  // P^T, after dropout once grad_score_block returns
  WeightOperand<P> grad;     // dS^T with respect to the final scores, before the softcap's factor
  T* visible;                // [kKeyBlock][kLanes] see multiply_visible
  T* of_statistics;          // [kKeyBlock][kLanes] what gradients of statistics add to dP

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    block.allocate(p, true, arena);
    weights.allocate(p, arena);
    grad.allocate(p, arena);
    visible = arena.take<T>(kKeyBlock * kLanes<P>);
    of_statistics = arena.take<T>(kKeyBlock * kLanes<P>);
  }
};

// Turns scores of a vector of queries into normalised weights, by the forward's statistics. The maximum is
// subtracted as in the forward, to the bit: the rounding error of a score of 1e8 would be an exponent beyond
// the range of floats.
template <class T, Weigh kWeigh, class S = Simd<T>>
class Normaliser {
  using Vec = typename S::Vec;

 public:
  SELFATTN_INLINE Normaliser(const T* row_max, const T* inverse_sum, T factor)
      : scale_(S::set(factor)), shift_(S::load(row_max)), inverse_(S::load(inverse_sum)) {}
  SELFATTN_INLINE Vec operator()(Vec score) const {
    return S::mul(weight_of<T, kWeigh, S>(score, scale_, shift_), inverse_);
  }

 private:
  Vec scale_, shift_, inverse_;
};

// Puts normalised weights of a block in place of its scores, which are still to be multiplied by `factor`. If
// a row's sum is NaN, its hidden keys get weights of 0 * NaN, unless kHiddenIsZero asks for 0.
template <class P, Weigh kWeigh, bool kHiddenIsZero>
void normalise_scores(const QueryStrip<P>& strip, int64_t keys, const Scalar<P>* row_max,
                      const Scalar<P>* inverse_sum, Scalar<P> factor, Scalar<P>* s) {
  using T = Scalar<P>;
  for (int64_t lane = 0; lane < strip.count; lane += Simd<T>::kWidth) {
    with_vectors_of<P>(strip.count - lane, [&](auto vectors) {
      using S = decltype(vectors);
      const auto hidden = S::set(-std::numeric_limits<T>::infinity());
      const Normaliser<T, kWeigh, S> weigh(row_max + lane, inverse_sum + lane, factor);
      for (int64_t j = 0; j < keys; ++j) {
        T* at = s + j * kLanes<P> + lane;
        const auto score = S::load(at);
        auto weight = weigh(score);
        if (kHiddenIsZero) weight = S::select(S::equal(score, hidden), S::set(T(0)), weight);
        S::store(at, weight);
      }
    });
  }
}

template <class P>
void normalise_block(const AttentionParams& p, const QueryStrip<P>& strip, int64_t keys,
                     const Scalar<P>* row_max, const Scalar<P>* inverse_sum, Scalar<P> factor,
                     bool hidden_is_zero, Scalar<P>* s) {
  with_weighing<P>(p, factor, [&](auto weigh) {
    if (hidden_is_zero) {
      normalise_scores<P, weigh.kind, true>(strip, keys, row_max, inverse_sum, factor, s);
    } else {
      normalise_scores<P, weigh.kind, false>(strip, keys, row_max, inverse_sum, factor, s);
    }
  });
}

// dS = P * (dP - delta). A hidden key's dP may be NaN; its weight is 0 and so is its gradient.
template <class T, class S = Simd<T>>
SELFATTN_INLINE typename S::Vec score_gradient(typename S::Vec weight, typename S::Vec grad,
                                               typename S::Vec delta) {
  const auto zero = S::set(T(0));
  return S::select(S::equal(weight, zero), zero, S::mul(weight, S::sub(grad, delta)));
}

// Returns d(sink) of the row with this place: P(sink) * (grad_sink - delta). It takes the library's exp,
// because the vectors' exp makes small weights 0.
template <class T>
T sink_gradient(const BackwardArguments& a, int64_t row, T sink, T row_max, T inverse_sum, T delta) {
  const T probability = std::exp(sink - row_max) * inverse_sum;
  const T own = a.grad_sink != nullptr ? static_cast<const T*>(a.grad_sink)[row] : T(0);
  return probability == T(0) ? T(0) : probability * (own - delta);
}

inline bool has_gradients_of_statistics(const BackwardArguments& a) {
  return a.grad_mean != nullptr || a.grad_keys != nullptr;
}

// Computes what gradients of statistics add to dP, from scores that are still to be multiplied by `factor`.
// It may be anything where a key is hidden.
template <class P>
void gradients_of_statistics(const AttentionParams& p, const BackwardArguments& a,
                             const GradientStrip<P>& strip, int64_t key, int64_t keys, const Scalar<P>* s,
                             Scalar<P> factor, Scalar<P>* result) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const auto* of_keys = static_cast<const T*>(a.grad_keys);
  if (of_keys != nullptr) of_keys += p.key_place(strip.batch, strip.head, key);
  for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
    const auto scale = S::set(factor), shift = S::load(strip.row_max + lane);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kLanes<P> + lane;
      auto sum = S::set(of_keys != nullptr ? of_keys[j] : T(0));
      if (a.grad_mean != nullptr) {
        const auto difference = S::sub(S::mul(S::load(s + at), scale), shift);
        sum = S::fma(S::load(strip.grad_mean + lane), difference, sum);
      }
      S::store(result + at, sum);
    }
  }
}

// Turns dS of capped scores into dS of the scores before the cap: times 1 - tanh^2.
template <class P>
void apply_softcap_gradient(const QueryStrip<P>& strip, int64_t keys, const Scalar<P>* capped,
                            Scalar<P>* grad) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const auto zero = S::set(T(0)), one = S::set(T(1));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const int64_t at = j * kLanes<P> + lane;
      const auto t = S::load(capped + at);
      const auto g = S::load(grad + at);
      // If the gradient is 0, the key may be hidden and t NaN.
      S::store(grad + at, S::select(S::equal(g, zero), zero, S::mul(g, S::sub(one, S::mul(t, t)))));
    }
  }
}

// The bias is -slope * |distance|, so d(slope) is the sum of dS times -|distance|: one sum per query of the
// strip.
template <class P>
void add_slope_rows(const AttentionParams& p, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                    const Scalar<P>* grad, Scalar<P>* slope_rows) {
  using T = Scalar<P>;
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t distance = strip.first + p.query_offset - key - j;
    for (int64_t lane = 0; lane < strip.count; ++lane) {
      const int64_t d = distance + lane;
      slope_rows[lane] -= static_cast<T>(d < 0 ? -d : d) * grad[j * kLanes<P> + lane];
    }
  }
}

// Clears dS of the lanes past the last query: they may see keys that no query sees, and must not count in a
// sum over lanes.
template <class P>
void clear_past_last(const QueryStrip<P>& strip, int64_t keys, Scalar<P>* grad) {
  using T = Scalar<P>;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = strip.count; lane < strip.vecs * Simd<T>::kWidth; ++lane)
      grad[j * kLanes<P> + lane] = T(0);
  }
}

// Returns dS of a vector of queries, summed over the keys of a block. There are four sums, because rounding
// errors grow with a sum's terms, and the terms of a row cancel.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec sum_over_keys(const T* grad, int64_t keys, int64_t stride) {
  using S = Simd<T>;
  typename S::Vec sums[4] = {S::set(T(0)), S::set(T(0)), S::set(T(0)), S::set(T(0))};
  for (int64_t j = 0; j < keys; j += 4) {
    for (int64_t i = 0; i < 4 && j + i < keys; ++i) {
      sums[i] = S::add(sums[i], S::load(grad + (j + i) * stride));
    }
  }
  return S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
}

// The place of a strip's paired blocks, for a block that is not needed in T: the index of its first query
// among those of its panel, and the rows of keys that it is to have.
struct PairedPlace {
  int64_t first_query, rows;
};

// The options with which weights may become pairs at once, because the scores hold them already. Dropout and
// the softcap's gradient need weights and dS as numbers.
constexpr OptionSet kPairedOptions = {Option::kMask,   Option::kAlibiSlopes, Option::kSinks,
                                      Option::kWindow, Option::kQueryOffset, Option::kBatchInvariant};

// Turns scores and dP in the scratch's blocks into weights and dS as pairs.
template <class P>
void pair_gradients(const AttentionParams& p, const GradientStrip<P>& strip, int64_t keys, Scalar<P> factor,
                    const PairedPlace& place, GradientScratch<P>& scratch);

// Keys first .. first + count - 1, which are the operands' rows from `from` on.
template <class P>
struct GradientBlock {
  int64_t first, count, from;
  const RowOperand<P>*keys, *values;
};

// Fills scratch.weights and scratch.grad for a block; returns false if all of it is hidden. With a place it
// fills them as pairs alone, which is for calls within kPairedOptions and ordinary strips.
template <class P>
bool grad_score_block(const AttentionParams& p, const BackwardArguments& a, GradientStrip<P>& strip,
                      const GradientBlock<P>& block, GradientScratch<P>& scratch, bool need_visible,
                      const PairedPlace* place = nullptr) {
  using T = Scalar<P>;
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<P>;
  const int64_t key = block.first, keys = block.count;
  T* weights = scratch.weights.block;
  T* grads = scratch.grad.block;
  T factor;
  if (!score_block<P>(p, strip, key, keys, *block.keys, block.from, scratch.block, weights, &factor)) {
    return false;
  }
  if (need_visible) mark_visible<P>(strip, keys, weights, scratch.visible);
  multiply_strip<P>(strip, *block.values, block.from, keys, strip.grad_out, strip.tail_grad_out, p.value_dim,
                    grads);
  if constexpr (!kDirect<P>) {
    if (place != nullptr) {
      pair_gradients<P>(p, strip, keys, factor, *place, scratch);
      return true;
    }
  }
  const bool adds = has_gradients_of_statistics(a);
  T* const added = scratch.of_statistics;
  if (adds) gradients_of_statistics<P>(p, a, strip, key, keys, weights, factor, added);
  normalise_block<P>(p, strip, keys, strip.row_max, strip.inverse_sum, factor, !strip.ordinary, weights);
  if (a.grad_weights.data != nullptr) {
    for (int64_t lane = 0; lane < strip.count; ++lane) {
      const View& g = a.grad_weights;
      const int64_t at = g.offset(strip.batch, strip.head, strip.first + lane) + key * g.stride[3];
      for (int64_t j = 0; j < keys; ++j) {
        grads[j * ld + lane] += load_element<T>(g.data, g.dtype, at + j * g.stride[3]);
      }
    }
  }
  if (p.dropout.enabled) {
    // Dropout scales dP as it scaled P. P itself is needed undropped for dS and dropped for dV.
    const StripDropout<P> pattern(p.dropout, strip, keep_scale<T>(p.dropout));
    for (int64_t j = 0; j < keys; j += 4) {
      for (int64_t v = 0; v < strip.vecs; ++v) {
        const auto delta = S::load(strip.delta + v * S::kWidth);
        typename S::Vec dropped[4];
        pattern.factors(key + j, v, dropped);
        for (int64_t i = 0; i < 4 && j + i < keys; ++i) {
          const int64_t at = (j + i) * ld + v * S::kWidth;
          const auto weight = S::load(weights + at);
          auto grad = S::mul(S::load(grads + at), dropped[i]);
          if (adds) grad = S::add(grad, S::load(added + at));
          S::store(grads + at, score_gradient<T>(weight, grad, delta));
          S::store(weights + at, S::mul(weight, dropped[i]));
        }
      }
    }
    return true;
  }
  for (int64_t lane = 0; lane < strip.count; lane += Simd<T>::kWidth) {
    with_vectors_of<P>(strip.count - lane, [&](auto vectors) {
      using V = decltype(vectors);
      const auto delta = V::load(strip.delta + lane);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = j * ld + lane;
        auto grad = V::load(grads + at);
        if (adds) grad = V::add(grad, V::load(added + at));
        V::store(grads + at, score_gradient<T, V>(V::load(weights + at), grad, delta));
      }
    });
  }
  return true;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
