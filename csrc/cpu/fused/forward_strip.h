// The forward's inner step: one strip of queries meets one block of keys. It is the online softmax (Milakov
// and Gimelshein 2018) on tiles (Dao et al. 2022), transposed as query_strip.h says.
#pragma once

#include "../products/key_rows.h"
#include "score_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A strip with its running softmax and output.
template <class P>
struct ForwardStrip : QueryStrip<P> {
  using T = Scalar<P>;

  T* out_t;    // [value_dim][kLanes] unnormalised O^T
  T* row_max;  // [kLanes]
  T* row_sum;  // [kLanes]
  // [kLanes] The sum of the weights as they meet the values, if they are rounded for that. It divides the
  // output: with row_sum, the rounding errors would not cancel in the part that all values have in common.
  T* used_sum;
  T* rescale;  // [kLanes] exp(old maximum - new maximum) of the current block
  // [kLanes] If they are asked for: the largest score without the sink, and the sum of weights times scores
  // less row_max; see Note [Statistics of scores] in core/attention_params.h.
  T *row_top, *row_mean;
  bool has_statistics = false;

  static int64_t out_size(const AttentionParams& p) { return round_up_to_vector<T>(p.value_dim) * kLanes<P>; }
  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    QueryStrip<P>::allocate(p, arena);
    out_t = arena.take<T>(out_size(p));
    row_max = arena.take<T>(kLanes<P>);
    row_sum = arena.take<T>(kLanes<P>);
    used_sum = arena.take<T>(kLanes<P>);
    rescale = arena.take<T>(kLanes<P>);
    row_top = arena.take<T>(kLanes<P>);
    row_mean = arena.take<T>(kLanes<P>);
  }

  // An attention sink (Xiao et al. 2023) is a score without a value: the softmax starts from it.
  void reset(const AttentionParams& p) {
    const T nothing = -std::numeric_limits<T>::infinity();
    const T sink = p.sinks.data != nullptr ? head_scalar<T>(p.sinks, this->batch, this->head) : nothing;
    for (int64_t lane = 0; lane < this->vecs * Simd<T>::kWidth; ++lane) {
      row_max[lane] = sink;
      row_sum[lane] = used_sum[lane] = sink == nothing ? T(0) : T(1);
      rescale[lane] = T(1);
      row_top[lane] = nothing;
      row_mean[lane] = T(0);
    }
    for (int64_t e = 0; e < p.value_dim; ++e) {
      memset(out_t + e * kLanes<P>, 0, static_cast<size_t>(this->vecs) * Simd<T>::kWidth * sizeof(T));
    }
  }

  void rescale_out(const AttentionParams& p) const {
    using S = Simd<T>;
    for (int64_t lane = 0; lane < this->vecs * S::kWidth; lane += S::kWidth) {
      const auto factor = S::load(rescale + lane);
      for (int64_t e = 0; e < p.value_dim; ++e) {
        T* at = out_t + e * kLanes<P> + lane;
        S::store(at, S::mul(S::load(at), factor));
      }
    }
  }

  // Sets the factors that turn the sums into the output. NaN stays NaN, which rounding by integers may lose.
  void inverse_sums(const AttentionParams& p, T* inverse) const {
    const bool rounded = this->query.rounds();
    const T* sums = rounded ? used_sum : row_sum;
    const T one = rounded && p.dropout.enabled ? keep_scale<T>(p.dropout) : T(1);
    for (int64_t lane = 0; lane < this->vecs * Simd<T>::kWidth; ++lane) {
      const T sum = row_sum[lane] == row_sum[lane] ? sums[lane] : row_sum[lane];
      inverse[lane] = sum == T(0) ? T(0) : one / sum;
    }
  }

  // A sum that underflowed from below is -0, but 0 if it has met a key that is hidden from its query and not
  // from its neighbours. This makes both 0.
  void drop_signs_of_zeros(const AttentionParams& p) const {
    using S = Simd<T>;
    for (int64_t e = 0; e < p.value_dim; ++e) {
      for (int64_t lane = 0; lane < this->vecs * S::kWidth; lane += S::kWidth) {
        T* at = out_t + e * kLanes<P> + lane;
        S::store(at, S::add(S::load(at), S::set(T(0))));
      }
    }
  }

  // 0 * Inf or 0 * NaN of a hidden key shows as NaN in the result.
  bool finite(const AttentionParams& p) const {
    return all_finite(out_t, kLanes<P>, p.value_dim, this->vecs * Simd<T>::kWidth);
  }
};

// The most that a block's weights may add up to in a row before the row's maximum follows the scores, if that
// means a pass over the output. Larger weights, up to e^12, are cheaper and as exact.
constexpr float kMostBlockSum = 64 * 2980.958f;

// Returns the largest of a block's scores, for each query of a vector.
template <class P, class S = Simd<Scalar<P>>>
SELFATTN_INLINE typename S::Vec most_of_lanes(int64_t keys, const Scalar<P>* column) {
  using T = Scalar<P>;
  constexpr int64_t ld = kLanes<P>;
  const auto nothing = S::set(-std::numeric_limits<T>::infinity());
  // There are four maxima, as a single chain would wait for its own latency.
  typename S::Vec most[4] = {nothing, nothing, nothing, nothing};
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    SELFATTN_UNROLL
    for (int i = 0; i < 4; ++i) most[i] = S::max(S::load(column + (j + i) * ld), most[i]);
  }
  for (; j < keys; ++j) most[0] = S::max(S::load(column + j * ld), most[0]);
  return S::max(S::max(most[0], most[1]), S::max(most[2], most[3]));
}

// The sums that a block adds to a vector of queries: that of its weights, that of the rounded weights, and
// that of weights times scores less their maximum.
template <class P>
struct LaneSums {
  typename Simd<Scalar<P>>::Vec all, used, mean;
};

// A softmax gives one of these beside weights: nothing, or row_top and row_mean.
enum class Statistics { kNone, kAll };

// Returns the difference of a score and its row's maximum, limited so that its product with a weight of 0 is
// 0. Weights of smaller scores are 0.
template <class T, class S = Simd<T>>
SELFATTN_INLINE typename S::Vec finite_difference(typename S::Vec score, typename S::Vec shift) {
  return S::max(S::sub(score, shift), S::set(ExpPolynomial<T>::kFlushBelow));
}

// Writes exp(s * scale - shift) of a vector of queries to `weights`.
template <class P, Weigh kWeigh, bool kPaired, Statistics kStatistics, class S = Simd<Scalar<P>>>
SELFATTN_INLINE LaneSums<P> weigh_lanes(int64_t keys, const Scalar<P>* column, int64_t lane,
                                        typename S::Vec scale, typename S::Vec shift,
                                        const WeightOperand<P>& weights) {
  using T = Scalar<P>;
  constexpr int64_t ld = kLanes<P>;
  typename S::Vec sum[4] = {S::set(T(0)), S::set(T(0)), S::set(T(0)), S::set(T(0))};
  typename S::Vec used[2] = {S::set(T(0)), S::set(T(0))};
  typename S::Vec mean[2] = {S::set(T(0)), S::set(T(0))};
  const auto weigh = [&](int64_t key, int i) {
    const auto score = S::load(column + key * ld);
    const auto weight = weight_of<T, kWeigh, S>(score, scale, shift);
    sum[i] = S::add(sum[i], weight);
    if constexpr (kStatistics == Statistics::kAll) {
      const auto scaled = kWeigh == Weigh::kWhole ? score : S::mul(score, scale);
      mean[i % 2] = S::fma(weight, finite_difference<T, S>(scaled, shift), mean[i % 2]);
    }
    return weight;
  };
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    typename S::Vec weight[4];
    SELFATTN_UNROLL
    for (int i = 0; i < 4; ++i) weight[i] = weigh(j + i, i);
    weights.template store<kWeigh, kPaired, S>(j, lane, weight, used);
  }
  if (j < keys) {
    typename S::Vec weight[4];
    for (int i = 0; i < 4; ++i) {
      weight[i] = S::set(T(0));
      // Each sum keeps its place, so that zeros after it change nothing.
      if (j + i < keys) weight[i] = weigh(j + i, i);
    }
    weights.template store<kWeigh, kPaired, S>(j, lane, weight, used);
  }
  return {S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3])), S::add(used[0], used[1]),
          S::add(mean[0], mean[1])};
}

// Does the work of softmax_block for the vector of queries at `lane`.
template <class P, Weigh kWeigh, bool kPaired, Statistics kStatistics, class S>
SELFATTN_INLINE bool softmax_lanes(const ForwardStrip<P>& strip, int64_t keys, const Scalar<P>* column,
                                   int64_t lane, Scalar<P> factor, const WeightOperand<P>& weights) {
  using T = Scalar<P>;
  // Sums in place need the maximum of a block only if its sum is large, which is rare, or if the largest
  // score itself is asked for. The scores must still be there then.
  constexpr bool kSumTells = WeightOperand<P>::template kSumsInPlace<kWeigh>;
  const auto nothing = S::set(-std::numeric_limits<T>::infinity());
  const auto scale = S::set(factor);
  const auto old_max = S::load(strip.row_max + lane);
  [[maybe_unused]] auto higher = S::equal(old_max, nothing);
  if constexpr (kSumTells && kStatistics == Statistics::kNone) {
    if (S::any(S::less(nothing, old_max))) {
      const auto shift = S::select(higher, S::set(T(0)), old_max);
      const LaneSums<P> sums =
          weigh_lanes<P, kWeigh, kPaired, kStatistics, S>(keys, column, lane, scale, shift, weights);
      higher = S::either(higher, S::less(S::set(T(kMostBlockSum)), sums.all));
      if (!S::any(higher)) {
        S::store(strip.row_sum + lane, S::add(S::load(strip.row_sum + lane), sums.all));
        S::store(strip.used_sum + lane, S::add(S::load(strip.used_sum + lane), sums.used));
        S::store(strip.rescale + lane, S::set(T(1)));
        return false;
      }
    }
  }
  bool moved = false;
  auto new_max = S::mul(most_of_lanes<P, S>(keys, column), scale);
  if constexpr (kStatistics == Statistics::kAll) {
    S::store(strip.row_top + lane, S::max(new_max, S::load(strip.row_top + lane)));
    higher = S::less(old_max, new_max);
  }
  if constexpr (kSumTells) {
    new_max = S::select(higher, S::max(new_max, old_max), old_max);
    moved = S::any(S::less(nothing, S::select(higher, old_max, nothing)));
  } else {
    new_max = S::max(new_max, old_max);
  }
  // If nothing has been visible yet, subtracting -inf would make NaN of -inf scores.
  const auto shift = S::select(S::equal(new_max, nothing), S::set(T(0)), new_max);
  const LaneSums<P> sums =
      weigh_lanes<P, kWeigh, kPaired, kStatistics, S>(keys, column, lane, scale, shift, weights);
  const auto rescale = exp_nonpositive<T, S>(S::sub(old_max, shift));
  if constexpr (kStatistics == Statistics::kAll) {
    // Scores that were counted from the old maximum are counted from the new one.
    const auto step = finite_difference<T, S>(old_max, shift);
    const auto mean = S::fma(S::load(strip.row_sum + lane), step, S::load(strip.row_mean + lane));
    S::store(strip.row_mean + lane, S::fma(mean, rescale, sums.mean));
  }
  S::store(strip.row_sum + lane, S::fma(S::load(strip.row_sum + lane), rescale, sums.all));
  if constexpr (is_one_piece(kWeigh)) {
    S::store(strip.used_sum + lane, S::fma(S::load(strip.used_sum + lane), rescale, sums.used));
  }
  S::store(strip.row_max + lane, new_max);
  S::store(strip.rescale + lane, rescale);
  return moved;
}

// Turns a block of scores, still to be multiplied by `factor`, into unnormalised weights and updates the
// running maximum and sum. The weights go to `weights`; `s` may be its block. With kPaired they go there as
// pairs, see WeightOperand. Returns whether sums in place have to be rescaled.
template <class P, Weigh kWeigh, bool kPaired, Statistics kStatistics>
bool softmax_block_with(const ForwardStrip<P>& strip, int64_t keys, const Scalar<P>* s, Scalar<P> factor,
                        const WeightOperand<P>& weights) {
  bool moved = false;
  for (int64_t lane = 0; lane < strip.count; lane += Simd<Scalar<P>>::kWidth) {
    with_vectors_of<P>(strip.count - lane, [&](auto vectors) {
      moved |= softmax_lanes<P, kWeigh, kPaired, kStatistics, decltype(vectors)>(strip, keys, s + lane, lane,
                                                                                 factor, weights);
    });
  }
  return moved;
}
template <class P, Weigh kWeigh, bool kPaired>
bool softmax_block(const ForwardStrip<P>& strip, int64_t keys, const Scalar<P>* s, Scalar<P> factor,
                   const WeightOperand<P>& weights) {
  return strip.has_statistics
             ? softmax_block_with<P, kWeigh, kPaired, Statistics::kAll>(strip, keys, s, factor, weights)
             : softmax_block_with<P, kWeigh, kPaired, Statistics::kNone>(strip, keys, s, factor, weights);
}

// Turns scores into the weights that meet the values: softmax and dropout, for which it calls
// drop(factor of the weights that are kept, block). `keep_block` asks for weights.block too, even if pairs
// alone would do for the product. Returns what softmax_block returns.
template <class P, class Drop>
bool weigh_block(const AttentionParams& p, const ForwardStrip<P>& strip, int64_t keys, Scalar<P> factor,
                 WeightOperand<P>& weights, bool keep_block, const Drop& drop) {
  bool moved = false;
  if constexpr (!kDirect<P>) {
    if (weights.sums_in_place() || (!p.dropout.enabled && !keep_block)) {
      with_weighing<P>(p, factor, [&](auto weigh) {
        moved = softmax_block<P, weigh.kind, true>(strip, keys, weights.block, factor, weights);
      });
      weights.pad_lanes(keys, strip.vecs);
      if (!p.dropout.enabled && !keep_block) return moved;
      weights.unpair_lanes(keys, strip.vecs);
    }
  }
  if (!weights.sums_in_place()) {
    with_weighing<P>(p, factor, [&](auto weigh) {
      moved = softmax_block<P, weigh.kind, false>(strip, keys, weights.block, factor, weights);
    });
  }
  if (p.dropout.enabled) {
    // Rounded weights stay as they are; the output is scaled instead, see inverse_sums.
    drop(weights.rounds() ? Scalar<P>(1) : keep_scale<Scalar<P>>(p.dropout), weights.block);
  }
  weights.ready_as_lanes(keys, strip.vecs);
  return moved;
}

// Sets visible[j][lane] to 0 where the score is -inf, and to 1 elsewhere; see multiply_visible.
template <class P>
void mark_visible(const QueryStrip<P>& strip, int64_t keys, const Scalar<P>* s, Scalar<P>* visible) {
  using T = Scalar<P>;
  using S = Simd<T>;
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const int64_t at = j * kLanes<P> + lane;
      S::store(visible + at, S::select(S::equal(S::load(s + at), hidden), S::set(T(0)), S::set(T(1))));
    }
  }
}

// The memory of a worker of the forward, without its strips.
template <class P>
struct ForwardScratch {
  using T = Scalar<P>;

  BlockScratch<P> block;
  RowOperand<P> keys;
  ColumnOperand<P> values;
  WeightOperand<P> weights;
  T *visible, *scale;
  char *paged_keys, *paged_values;  // see key_source; operands may use them where they lie
  bool large_values;                // whether an operand has seen any; see overflow.h

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    block.allocate(p, false, arena);
    keys.allocate(p, loaded_keys<P>(p), p.head_dim, arena);
    values.allocate(p, loaded_keys<P>(p), p.value_dim, arena);
    weights.allocate(p, arena);
    visible = arena.take<T>(kKeyBlock * kLanes<P>);
    scale = arena.take<T>(kLanes<P>);
    paged_keys = arena.take<char>(block_bytes(p, loaded_keys<P>(p), p.head_dim));
    paged_values = arena.take<char>(block_bytes(p, loaded_keys<P>(p), p.value_dim));
  }
};

// One strip meets a block of keys, which begins at row `from` of the operands in the scratch.
template <class P>
void forward_block(const AttentionParams& p, ForwardStrip<P>& strip, int64_t key, int64_t keys, int64_t from,
                   ForwardScratch<P>& scratch, bool leave_hidden_out) {
  using T = Scalar<P>;
  T factor;
  if (!score_block<P>(p, strip, key, keys, scratch.keys, from, scratch.block, scratch.weights.block,
                      &factor)) {
    return;
  }
  const bool mark = leave_hidden_out || scratch.values.special(from, keys);
  const T* visible = nullptr;
  if (mark) {
    mark_visible<P>(strip, keys, scratch.weights.block, scratch.visible);
    visible = scratch.visible;
  }
  const bool in_place = scratch.weights.sums_in_place();
  const auto drop = [&](T kept, T* weights) { apply_dropout<P>(p.dropout, strip, key, keys, kept, weights); };
  if (weigh_block<P>(p, strip, keys, factor, scratch.weights, mark, drop)) strip.rescale_out(p);
  const ColumnSums<T> out{strip.out_t, in_place ? Update::kAdd : Update::kScaleAdd, strip.rescale};
  multiply_strip_columns<P>(strip, scratch.values, from, keys, p.value_dim, scratch.weights, out, visible);
}

// Returns the keys that a strip meets among the `loaded` keys that a scratch holds from key `first` on: whole
// blocks, except the last one.
template <class P>
KeyRange loaded_keys_of(const ForwardStrip<P>& strip, int64_t first, int64_t loaded) {
  return {larger(strip.keys.begin / kKeyBlock * kKeyBlock, first), smaller(strip.keys.end, first + loaded)};
}

template <class P>
void forward_blocks(const AttentionParams& p, ForwardStrip<P>& strip, KeyRange keys, int64_t first,
                    ForwardScratch<P>& scratch, bool leave_hidden_out) {
  for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) {
    const int64_t count = smaller(keys.end - key, kKeyBlock);
    forward_block<P>(p, strip, key, count, key - first, scratch, leave_hidden_out);
  }
}

// Strips meet the `loaded` keys that the scratch holds from key `first` on. pairs/pipeline.h specialises it.
template <class P>
void forward_loaded(const AttentionParams& p, ForwardStrip<P>* strips, int64_t count, int64_t first,
                    int64_t loaded, ForwardScratch<P>& scratch, bool leave_hidden_out) {
  for (int64_t i = 0; i < count; ++i) {
    forward_blocks<P>(p, strips[i], loaded_keys_of(strips[i], first, loaded), first, scratch,
                      leave_hidden_out);
  }
}

// Strips of one (batch, kv head) meet keys begin .. end - 1. Keys and values are brought in once for all
// strips, some at a time; then each strip walks over those, so that its output stays in the cache. The places
// where a strip's keys are divided depend on their positions alone, not on the other strips.
template <class P>
void forward_keys(const AttentionParams& p, ForwardStrip<P>* strips, int64_t count, int64_t begin,
                  int64_t end, ForwardScratch<P>& scratch, bool leave_hidden_out) {
  if (count == 0) return;
  const int64_t batch = strips[0].batch, kv_head = p.kv_head(strips[0].head);
  const int64_t at_once = loaded_keys<P>(p);
  for (int64_t first = begin / kKeyBlock * kKeyBlock, next; first < end; first = next) {
    next = (first / at_once + 1) * at_once;
    const int64_t loaded = smaller(end, next) - first;
    scratch.keys.load(key_source(p, p.key, batch, kv_head, first, loaded, p.head_dim, scratch.paged_keys));
    scratch.values.load(
        key_source(p, p.value, batch, kv_head, first, loaded, p.value_dim, scratch.paged_values));
    scratch.large_values |= scratch.values.large();
    forward_loaded<P>(p, strips, count, first, loaded, scratch, leave_hidden_out);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
