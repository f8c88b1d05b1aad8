// The tiles of second derivatives, of a strip and a block of keys. They hold what the gradients of F = <dO,
// tangent_out> + <dlse, tangent_lse> are made of (Note [Second derivatives] in core/tangents.h). Per row,
// with the sink among the keys if there is one (it has no value):
//
//     m = sum(P T)                          tangent_lse
//     dS = P (dP - delta)                   delta = rowsum(dO * O) - dlse, as in the backward
//     A = (dP - delta) (T - m) + U          U = dO tangent_v^T
//     c = sum(P A)
//     dS2 = P (A - c)                       the gradient of the final scores
//
// m and c are known when all keys have been met once. Until then a tile keeps each block's products, so that
// nothing is multiplied twice: 5 products make the tiles and 7 use them.
#pragma once

#include "gradient_strip.h"
#include "tangent_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The numbers of a block of keys and a strip, [kKeyBlock][kLanes] each.
template <class T>
struct SecondTile {
  T* weights;    // P, negative where dropout drops it;   then P after dropout
  T* tangents;   // T - origin;                           then P (T - m) after dropout
  T* gradients;  // dP - delta;                           then dS of scores before the softcap
  T* values;     // U;                                    then dS2, likewise
  // These two are nullptr if there is no softcap.
  T* capped;  // its tanh
  T* of_cap;  // the part of T that comes through it

  static constexpr int64_t kSize = kKeyBlock * kLanes<T>;
  static int64_t arrays(const AttentionParams& p) { return p.softcap > 0.0 ? 6 : 4; }

  SecondTile() = default;
  SecondTile(const AttentionParams& p, T* memory)
      : weights(memory),
        tangents(memory + kSize),
        gradients(memory + 2 * kSize),
        values(memory + 3 * kSize),
        capped(p.softcap > 0.0 ? memory + 4 * kSize : nullptr),
        of_cap(p.softcap > 0.0 ? memory + 5 * kSize : nullptr) {}
};

template <class P>
struct SecondStrip : GradientStrip<P> {
  using T = Scalar<P>;

  TangentLanes<P> lanes;
  T* origin;  // [kLanes] see tangent_origin
  // [kLanes] sums over the keys, with x' for T - origin and g' for dP - delta
  T *sum_pt, *sum_pgt, *sum_pg, *sum_pu;  // of P x', P g' x', P g', P U
  T* mean;                                // [kLanes] m - origin
  T* correction;                          // [kLanes] c

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    GradientStrip<P>::allocate(p, arena);
    lanes.allocate(p, arena);
    for (T** numbers : {&origin, &sum_pt, &sum_pgt, &sum_pg, &sum_pu, &mean, &correction}) {
      *numbers = arena.take<T>(kLanes<T>);
    }
  }
  void begin_second(const TangentCall& call, const BackwardArguments& a, int64_t batch, int64_t head,
                    int64_t first, int64_t count) {
    this->begin_gradient(call.p, a, batch, head, first, count);
    lanes.begin(call, *this);
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      origin[lane] = std::numeric_limits<T>::quiet_NaN();
      sum_pt[lane] = sum_pgt[lane] = sum_pg[lane] = sum_pu[lane] = T(0);
    }
  }
};

// Makes a tile of the first `keys` keys of a block: P, T, dP and U, after dropout. Returns false if all of it
// is hidden. `visible` is nullable, see multiply_visible.
template <class P>
bool fill_tile(const TangentCall& call, SecondStrip<P>& strip, const TangentKeys<P>& block, int64_t keys,
               const BlockScratch<P>& scratch, const SecondTile<Scalar<P>>& tile, Scalar<P>* visible) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const AttentionParams& p = call.p;
  BlockScratch<P> own = scratch;
  if (tile.capped != nullptr) own.capped = tile.capped;
  T factor;
  if (!score_block<P>(p, strip, block.first, keys, block.keys.with_lanes, 0, own, tile.weights, &factor))
    return false;
  if (visible != nullptr) mark_visible<P>(strip, keys, tile.weights, visible);
  normalise_block<P>(p, strip, keys, strip.row_max, strip.inverse_sum, factor, !strip.ordinary, tile.weights);
  tangent_block<P>(call, strip, strip.lanes, block, own, tile.tangents, tile.of_cap);
  multiply_strip<P>(strip, block.values.with_lanes, 0, keys, strip.grad_out, strip.tail_grad_out, p.value_dim,
                    tile.gradients);
  if (call.t.value.data != nullptr) {
    multiply_lanes<P>(block.value_tangents.with_lanes, 0, keys, strip.grad_out, p.value_dim, strip.count,
                      tile.values);
  } else {
    memset(tile.values, 0, static_cast<size_t>(keys * kLanes<T>) * sizeof(T));
  }
  if (!p.dropout.enabled) return true;
  const StripDropout<P> pattern(p.dropout, strip, keep_scale<T>(p.dropout));
  const auto zero = S::set(T(0));
  for (int64_t j = 0; j < keys; j += 4) {
    for (int64_t v = 0; v < strip.vecs; ++v) {
      typename S::Vec factors[4];
      pattern.factors(block.first + j, v, factors);
      for (int64_t i = 0; i < 4 && j + i < keys; ++i) {
        const int64_t at = (j + i) * kLanes<T> + v * S::kWidth;
        const auto weight = S::load(tile.weights + at);
        const auto dropped = S::equal(factors[i], zero);
        S::store(tile.weights + at, S::select(dropped, S::sub(zero, weight), weight));
        S::store(tile.gradients + at, S::mul(S::load(tile.gradients + at), factors[i]));
        S::store(tile.values + at, S::mul(S::load(tile.values + at), factors[i]));
      }
    }
  }
  return true;
}

// Subtracts the row's origin and delta from a tile's numbers, and adds to the row's sums. Numbers of keys
// that a row does not see may be NaN, and become 0.
template <class P>
void centre_tile(const SecondStrip<P>& strip, int64_t keys, const SecondTile<Scalar<P>>& tile) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const auto zero = S::set(T(0));
  for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
    const auto origin =
        tangent_origin<T>(keys, tile.weights + lane, tile.tangents + lane, S::load(strip.origin + lane));
    S::store(strip.origin + lane, origin);
    const auto delta = S::load(strip.delta + lane);
    // Each sum has two halves, because rounding errors grow with the number of terms.
    typename S::Vec pt[2] = {zero, zero}, pgt[2] = {zero, zero}, pg[2] = {zero, zero}, pu[2] = {zero, zero};
    const auto centre = [&](int64_t j, int half) {
      const int64_t at = j * kLanes<T> + lane;
      const auto weight = S::abs(S::load(tile.weights + at));
      const auto hidden = S::equal(weight, zero);
      const auto x = S::select(hidden, zero, S::sub(S::load(tile.tangents + at), origin));
      const auto g = S::select(hidden, zero, S::sub(S::load(tile.gradients + at), delta));
      const auto u = S::select(hidden, zero, S::load(tile.values + at));
      S::store(tile.tangents + at, x);
      S::store(tile.gradients + at, g);
      S::store(tile.values + at, u);
      const auto weighted = S::mul(weight, g);
      pt[half] = S::fma(weight, x, pt[half]);
      pgt[half] = S::fma(weighted, x, pgt[half]);
      pg[half] = S::add(pg[half], weighted);
      pu[half] = S::fma(weight, u, pu[half]);
    };
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      centre(j, 0);
      centre(j + 1, 1);
    }
    if (j < keys) centre(j, 0);
    const auto add = [lane](T* sums, const typename S::Vec(&parts)[2]) {
      S::store(sums + lane, S::add(S::load(sums + lane), S::add(parts[0], parts[1])));
    };
    add(strip.sum_pt, pt);
    add(strip.sum_pgt, pgt);
    add(strip.sum_pg, pg);
    add(strip.sum_pu, pu);
  }
}

// Computes m and c of a strip that has met all keys, and also tangent_lse and the gradient of the sink unless
// they are null.
template <class P>
void finish_rows(const TangentCall& call, const SecondStrip<P>& strip, Scalar<P>* tangent_lse,
                 Scalar<P>* grad_sinks) {
  using T = Scalar<P>;
  const AttentionParams& p = call.p;
  const bool has_sink = p.sinks.data != nullptr;
  const T sink = has_sink ? head_scalar<T>(p.sinks, strip.batch, strip.head) : T(0);
  const T of_sink =
      call.t.sinks.data != nullptr ? head_scalar<T>(call.t.sinks, strip.batch, strip.head) : T(0);
  for (int64_t lane = 0; lane < strip.vecs * Simd<T>::kWidth; ++lane) {
    if (strip.origin[lane] != strip.origin[lane]) strip.origin[lane] = T(0);
    // This is the library's exp, because the vectors' exp makes small weights 0.
    T weight = T(0);
    if (has_sink && lane < strip.count) {
      weight = std::exp(sink - strip.row_max[lane]) * strip.inverse_sum[lane];
    }
    const bool any = weight != T(0);
    const T tangent = of_sink - strip.origin[lane];
    const T mean = strip.sum_pt[lane] + (any ? weight * tangent : T(0));
    const T a = any ? -strip.delta[lane] * (tangent - mean) : T(0);  // A of the sink
    T correction = strip.sum_pgt[lane] - mean * strip.sum_pg[lane] + strip.sum_pu[lane];
    if (any) correction += weight * a;
    strip.mean[lane] = mean;
    strip.correction[lane] = correction;
    if (lane >= strip.count) continue;
    if (tangent_lse != nullptr) tangent_lse[lane] = mean + strip.origin[lane];
    if (grad_sinks != nullptr) grad_sinks[lane] = any ? weight * (a - correction) : T(0);
  }
}

// Turns a centred tile into the operands of the products, before the factors of a softcap.
template <class P>
void weigh_tile(const AttentionParams& p, const SecondStrip<P>& strip, int64_t keys,
                const SecondTile<Scalar<P>>& tile) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const auto zero = S::set(T(0));
  const auto keep = S::set(p.dropout.enabled ? keep_scale<T>(p.dropout) : T(1));
  for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
    const auto mean = S::load(strip.mean + lane), correction = S::load(strip.correction + lane);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kLanes<T> + lane;
      const auto marked = S::load(tile.weights + at), weight = S::abs(marked);
      const auto hidden = S::equal(weight, zero);
      const auto kept = S::select(S::less(marked, zero), zero, S::mul(marked, keep));
      const auto deviation = S::sub(S::load(tile.tangents + at), mean), g = S::load(tile.gradients + at);
      const auto second = S::sub(S::fma(g, deviation, S::load(tile.values + at)), correction);
      S::store(tile.weights + at, kept);
      S::store(tile.tangents + at, S::select(hidden, zero, S::mul(kept, deviation)));
      S::store(tile.gradients + at, S::mul(weight, g));
      S::store(tile.values + at, S::select(hidden, zero, S::mul(weight, second)));
    }
  }
}

// Turns gradients of final scores into those before the softcap: dS times 1 - t^2, and dS2 with what the
// curvature of the tanh adds.
template <class P>
void apply_second_softcap(const AttentionParams& p, const SecondStrip<P>& strip, int64_t keys,
                          const SecondTile<Scalar<P>>& tile) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const auto zero = S::set(T(0)), one = S::set(T(1));
  const auto curvature = S::set(static_cast<T>(-2.0 / p.softcap));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const int64_t at = j * kLanes<T> + lane;
      const auto t = S::load(tile.capped + at), slope = S::sub(one, S::mul(t, t));
      const auto first = S::load(tile.gradients + at), second = S::load(tile.values + at);
      // If both are 0, the key may be hidden and the rest NaN.
      const auto bend = S::mul(S::mul(curvature, t), S::mul(S::load(tile.of_cap + at), first));
      const auto bent = S::select(S::equal(first, zero), zero, bend);
      S::store(tile.values + at,
               S::add(S::select(S::equal(second, zero), zero, S::mul(second, slope)), bent));
      S::store(tile.gradients + at, S::select(S::equal(first, zero), zero, S::mul(first, slope)));
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
