// The pass of forward mode: out and lse with their tangents, in one online softmax. With e the weights before
// they are normalised, T the tangents of the scores and m = sum(e T) / sum(e):
//
//     tangent_out = (sum(e T v) + sum(e tv)) / sum(e) - m out,    tangent_lse = m
#pragma once

#include "overflow.h"
#include "tangent_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The most strips of an item. They share the blocks of keys and values that they bring into the cache.
constexpr int64_t kMostJvpStrips = 8;

template <class P>
struct JvpStrip : ForwardStrip<P> {
  using T = Scalar<P>;

  TangentLanes<P> lanes;
  T* tangent_t;    // [value_dim][kLanes] sum of e (T - origin) v + e tv
  T* tangent_sum;  // [kLanes] sum of e (T - origin)
  T* origin;       // [kLanes] see tangent_origin

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    ForwardStrip<P>::allocate(p, arena);
    lanes.allocate(p, arena);
    tangent_t = arena.take<T>(ForwardStrip<P>::out_size(p));
    tangent_sum = arena.take<T>(kLanes<T>);
    origin = arena.take<T>(kLanes<T>);
  }
  void reset(const AttentionParams& p) {
    ForwardStrip<P>::reset(p);
    memset(tangent_t, 0, static_cast<size_t>(p.value_dim * kLanes<T>) * sizeof(T));
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      tangent_sum[lane] = T(0);
      origin[lane] = std::numeric_limits<T>::quiet_NaN();
    }
  }
  bool finite(const AttentionParams& p) const {
    const int64_t lanes_in_use = this->vecs * Simd<T>::kWidth;
    return ForwardStrip<P>::finite(p) && all_finite(tangent_t, kLanes<T>, p.value_dim, lanes_in_use) &&
           all_finite(tangent_sum, kLanes<T>, 1, lanes_in_use);
  }
};

template <class P>
struct JvpTask {
  using T = Scalar<P>;

  TangentCall call;
  const AttentionParams& p;
  const JvpArguments& a;
  int64_t strips_per_item, items_per_head;

  JvpTask(const AttentionParams& params, const JvpArguments& arguments, int threads)
      : call(params, arguments.tangents), p(params), a(arguments) {
    const int64_t in_head = divide_up(p.queries, kLanes<T>);
    const int64_t per_thread = p.batch * p.heads * in_head / (4 * threads);
    strips_per_item = limited(per_thread, 1, smaller(kMostJvpStrips, larger(in_head, 1)));
    items_per_head = divide_up(in_head, strips_per_item);
  }
  int64_t items() const { return p.batch * p.heads * items_per_head; }

  struct Parts {
    TangentKeys<P> keys;
    BlockScratch<P> block;
    WeightOperand<P> weights, tangents;
    T *visible, *scale;
    JvpStrip<P> strips[kMostJvpStrips];

    SELFATTN_OUT_OF_LINE void allocate(const JvpTask& task, Arena& arena) {
      block.allocate(task.p, true, arena);
      keys.allocate(task.p, arena);
      weights.allocate(task.p, arena);
      tangents.allocate(task.p, arena);
      visible = arena.take<T>(kKeyBlock * kLanes<T>);
      scale = arena.take<T>(kLanes<T>);
      for (JvpStrip<P>& strip : strips) strip.allocate(task.p, arena);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    // Later queries see more keys under a causal mask, so the longest items go first.
    const int64_t all_heads = p.batch * p.heads;
    const int64_t head_index = item % all_heads, group = items_per_head - 1 - item / all_heads;
    const int64_t begin = group * strips_per_item * kLanes<T>;
    const int64_t end = smaller(begin + strips_per_item * kLanes<T>, p.queries);
    int64_t strips = 0;
    for (int64_t first = begin; first < end; ++strips) {
      const int64_t count = strip_queries<T>(first, end);
      s.strips[strips].begin(p, head_index / p.heads, head_index % p.heads, first, count);
      s.strips[strips].lanes.begin(call, s.strips[strips]);
      first += count;
    }
    run(strips, s, false);
    bool finite = true;
    for (int64_t i = 0; i < strips; ++i) finite = finite && s.strips[i].finite(p);
    if (!finite) run(strips, s, true);
    for (int64_t i = 0; i < strips; ++i) finish(s.strips[i], s.scale);
  }

  void run(int64_t strips, Scratch& s, bool leave_hidden_out) const {
    KeyRange range{p.keys, 0};
    for (int64_t i = 0; i < strips; ++i) {
      s.strips[i].reset(p);
      range.begin = smaller(range.begin, s.strips[i].keys.begin);
      range.end = larger(range.end, s.strips[i].keys.end);
    }
    for (int64_t key = range.begin / kKeyBlock * kKeyBlock; key < range.end; key += kKeyBlock) {
      const JvpStrip<P>& any = s.strips[0];
      s.keys.load(call, any.batch, p.kv_head(any.head), key, smaller(range.end - key, kKeyBlock),
                  Meets::kLanes, Meets::kWeights);
      for (int64_t i = 0; i < strips; ++i) {
        JvpStrip<P>& strip = s.strips[i];
        const int64_t count = smaller(strip.keys.end - key, s.keys.count);
        if (count > 0 && key + kKeyBlock > strip.keys.begin) add_block(s, strip, count, leave_hidden_out);
      }
    }
  }

  void add_block(Scratch& s, JvpStrip<P>& strip, int64_t keys, bool leave_hidden_out) const {
    const int64_t key = s.keys.first;
    T factor;
    T* const weights = s.weights.block;
    if (!score_block<P>(p, strip, key, keys, s.keys.keys.with_lanes, 0, s.block, weights, &factor)) return;
    T* visible = nullptr;
    const bool moves = a.tangents.value.data != nullptr;
    if (leave_hidden_out || s.keys.values.with_weights.special(0, keys) ||
        (moves && s.keys.value_tangents.with_weights.special(0, keys))) {
      visible = s.visible;
      mark_visible<P>(strip, keys, weights, visible);
    }
    tangent_block<P>(call, strip, strip.lanes, s.keys, s.block, s.tangents.block);
    with_weighing<P>(p, factor, [&](auto weigh) {
      softmax_block<P, weigh.kind, false>(strip, keys, weights, factor, s.weights);
    });
    weigh_tangents(strip, keys, weights, s.tangents.block);
    if (p.dropout.enabled) {
      apply_dropout<P>(p.dropout, strip, key, keys, keep_scale<T>(p.dropout), weights, s.tangents.block);
    }
    s.weights.ready_as_lanes(keys, strip.vecs);
    s.tangents.ready_as_lanes(keys, strip.vecs);
    const auto add = [&](const TangentRows<P>& rows, const WeightOperand<P>& w, T* sums, Update update) {
      multiply_columns<P>(rows.with_weights, 0, keys, p.value_dim, w, strip.count,
                          {sums, update, strip.rescale}, visible);
    };
    add(s.keys.values, s.weights, strip.out_t, Update::kScaleAdd);
    add(s.keys.values, s.tangents, strip.tangent_t, Update::kScaleAdd);
    if (moves) add(s.keys.value_tangents, s.weights, strip.tangent_t, Update::kAdd);
  }

  // Turns T into e (T - origin) and adds them up. It is 0 where the weight is 0, whose tangent may be NaN.
  static void weigh_tangents(const JvpStrip<P>& strip, int64_t keys, const T* weights, T* tangents) {
    using S = Simd<T>;
    const auto zero = S::set(T(0));
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const auto origin =
          tangent_origin<T>(keys, weights + lane, tangents + lane, S::load(strip.origin + lane));
      S::store(strip.origin + lane, origin);
      typename S::Vec sums[4] = {zero, zero, zero, zero};
      for (int64_t first = 0; first < keys; first += 4) {
        for (int64_t i = 0; i < 4 && first + i < keys; ++i) {
          const int64_t at = (first + i) * kLanes<T> + lane;
          const auto weight = S::load(weights + at);
          auto x = S::mul(weight, S::sub(S::load(tangents + at), origin));
          x = S::select(S::equal(weight, zero), zero, x);
          sums[i] = S::add(sums[i], x);
          S::store(tangents + at, x);
        }
      }
      const auto sum = S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
      S::store(strip.tangent_sum + lane,
               S::fma(S::load(strip.tangent_sum + lane), S::load(strip.rescale + lane), sum));
    }
  }

  void finish(const JvpStrip<P>& strip, T* scale) const {
    using S = Simd<T>;
    const ForwardOutputs& o = a.forward;
    const int64_t row = p.row(strip.batch, strip.head, strip.first);
    const size_t bytes = static_cast<size_t>(strip.count) * sizeof(T);
    memcpy(static_cast<T*>(o.row_max) + row, strip.row_max, bytes);
    memcpy(static_cast<T*>(o.row_sum) + row, strip.row_sum, bytes);
    strip.inverse_sums(p, scale);
    const int64_t at = o.out.offset(strip.batch, strip.head, strip.first);
    void* residual = o.out_residual != nullptr ? element(o.out_residual, p.dtype, at) : nullptr;
    store_transposed<T>(element(o.out.data, p.dtype, at), p.dtype, o.out.stride[2], strip.count, p.value_dim,
                        strip.out_t, kLanes<T>, scale, residual);
    if (!strip.template ForwardStrip<P>::finite(p)) {
      mend_overflow<T>(p, o, strip.batch, strip.head, strip.first, strip.count);
    }

    const bool has_sink = p.sinks.data != nullptr;
    const T sink = has_sink ? head_scalar<T>(p.sinks, strip.batch, strip.head) : T(0);
    const T of_sink =
        a.tangents.sinks.data != nullptr ? head_scalar<T>(a.tangents.sinks, strip.batch, strip.head) : T(0);
    T* lse = static_cast<T*>(a.tangent_lse) + row;
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; ++lane) {
      const T origin = strip.origin[lane] == strip.origin[lane] ? strip.origin[lane] : T(0);
      T sum = strip.tangent_sum[lane];
      // This is the library's exp, because the vectors' exp makes small weights 0.
      if (has_sink && strip.row_max[lane] != -std::numeric_limits<T>::infinity()) {
        const T weight = std::exp(sink - strip.row_max[lane]);
        if (weight != T(0)) sum += weight * (of_sink - origin);
      }
      const T mean = sum * (strip.row_sum[lane] == T(0) ? T(0) : T(1) / strip.row_sum[lane]);
      strip.tangent_sum[lane] = mean;
      if (lane < strip.count) lse[lane] = mean + origin;
    }
    for (int64_t e = 0; e < p.value_dim; ++e) {
      for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
        T* tangent = strip.tangent_t + e * kLanes<T> + lane;
        const auto out = S::load(strip.out_t + e * kLanes<T> + lane);
        S::store(tangent, S::sub(S::load(tangent), S::mul(S::load(strip.tangent_sum + lane), out)));
      }
    }
    const View& g = a.tangent_out;
    store_transposed<T>(element(g.data, p.dtype, g.offset(strip.batch, strip.head, strip.first)), p.dtype,
                        g.stride[2], strip.count, p.value_dim, strip.tangent_t, kLanes<T>, scale);
  }
};

template <class P>
void jvp_pass(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool) {
  if (p.sequences.any()) {
    const auto calls = element_calls(p, a, 0, kAnyQueries);
    const auto joint = joint_task<JvpTask<P>>(calls, pool.threads);
    return for_each_item(pool, joint.items(), joint, Items::kIndependent);
  }
  const JvpTask<P> task(p, a, pool.threads);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
