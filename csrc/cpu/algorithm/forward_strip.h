// The forward's inner step: one strip of queries meets one block of keys. Online softmax (Milakov and
// Gimelshein 2018) on tiles (Dao et al. 2022), transposed as query_strip.h says.
#pragma once

#include "score_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A strip with its running softmax and output.
template <class T>
struct ForwardStrip : QueryStrip<T> {
  T* out_t;    // [value_dim][kLanes] unnormalised O^T
  T* row_max;  // [kLanes]
  T* row_sum;  // [kLanes]
  T* rescale;  // [kLanes] exp(old maximum - new maximum) of the current block

  static int64_t out_size(const AttentionParams& p) { return round_up_to_vector<T>(p.value_dim) * kLanes<T>; }
  static int64_t bytes(const AttentionParams& p) {
    return Arena::bytes_for<T>(QueryStrip<T>::query_size(p)) + Arena::bytes_for<T>(out_size(p)) +
           3 * Arena::bytes_for<T>(kLanes<T>);
  }
  void allocate(const AttentionParams& p, Arena& arena) {
    this->query_t = arena.take<T>(QueryStrip<T>::query_size(p));
    out_t = arena.take<T>(out_size(p));
    row_max = arena.take<T>(kLanes<T>);
    row_sum = arena.take<T>(kLanes<T>);
    rescale = arena.take<T>(kLanes<T>);
  }

  // An attention sink (Xiao et al. 2023) is a score without a value: the softmax starts from it.
  void reset(const AttentionParams& p, bool with_sink = true) {
    const T nothing = -std::numeric_limits<T>::infinity();
    const T sink =
        with_sink && p.sinks.data != nullptr ? head_scalar<T>(p.sinks, this->batch, this->head) : nothing;
    for (int64_t lane = 0; lane < this->vecs * Simd<T>::kWidth; ++lane) {
      row_max[lane] = sink;
      row_sum[lane] = sink == nothing ? T(0) : T(1);
    }
    for (int64_t e = 0; e < p.value_dim; ++e) {
      memset(out_t + e * kLanes<T>, 0, static_cast<size_t>(this->vecs) * Simd<T>::kWidth * sizeof(T));
    }
  }

  // 0 * Inf or 0 * NaN of a hidden key shows as NaN in the result.
  bool finite(const AttentionParams& p) const {
    return all_finite(out_t, kLanes<T>, p.value_dim, this->vecs * Simd<T>::kWidth);
  }
};

// Turns a block of scores into unnormalised weights in place and moves the running maximum and sum on.
template <class T>
void softmax_block(const ForwardStrip<T>& strip, int64_t keys, T* s) {
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const auto nothing = S::set(-std::numeric_limits<T>::infinity());
  for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
    T* column = s + lane;
    const auto old_max = S::load(strip.row_max + lane);
    // Four maxima and four sums: one chain would wait for its own latency.
    typename S::Vec most[4] = {old_max, old_max, old_max, old_max};
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4) {
      SELFATTN_UNROLL
      for (int i = 0; i < 4; ++i) most[i] = S::max(S::load(column + (j + i) * ld), most[i]);
    }
    for (; j < keys; ++j) most[0] = S::max(S::load(column + j * ld), most[0]);
    const auto new_max = S::max(S::max(most[0], most[1]), S::max(most[2], most[3]));
    // Where nothing has been visible yet, subtracting -inf would make NaN of -inf scores.
    const auto shift = S::select(S::equal(new_max, nothing), S::set(T(0)), new_max);
    typename S::Vec sum[4] = {S::set(T(0)), S::set(T(0)), S::set(T(0)), S::set(T(0))};
    for (j = 0; j + 4 <= keys; j += 4) {
      SELFATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const auto weight = exp_nonpositive<T>(S::sub(S::load(column + (j + i) * ld), shift));
        S::store(column + (j + i) * ld, weight);
        sum[i] = S::add(sum[i], weight);
      }
    }
    for (; j < keys; ++j) {
      const auto weight = exp_nonpositive<T>(S::sub(S::load(column + j * ld), shift));
      S::store(column + j * ld, weight);
      sum[0] = S::add(sum[0], weight);
    }
    const auto block_sum = S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3]));
    const auto rescale = exp_nonpositive<T>(S::sub(old_max, shift));
    S::store(strip.row_sum + lane, S::fma(S::load(strip.row_sum + lane), rescale, block_sum));
    S::store(strip.row_max + lane, new_max);
    S::store(strip.rescale + lane, rescale);
  }
}

// visible[j][lane] = 0 where the score is -inf, 1 elsewhere; see multiply_visible.
template <class T>
void mark_visible(const QueryStrip<T>& strip, int64_t keys, const T* s, T* visible) {
  using S = Simd<T>;
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const int64_t at = j * kLanes<T> + lane;
      S::store(visible + at, S::select(S::equal(S::load(s + at), hidden), S::set(T(0)), S::set(T(1))));
    }
  }
}

// What a worker of the forward needs besides its strips.
template <class T>
struct ForwardScratch {
  BlockScratch<T> block;
  T *scores, *visible, *key_buffer, *value_buffer, *scale;

  static int64_t bytes(const AttentionParams& p) {
    return BlockScratch<T>::bytes(false) + 2 * Arena::bytes_for<T>(kKeyBlock * kLanes<T>) +
           Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.head_dim)) +
           Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.value_dim)) +
           Arena::bytes_for<T>(kLanes<T>);
  }
  ForwardScratch(const AttentionParams& p, Arena& arena)
      : block(arena, false),
        scores(arena.take<T>(kKeyBlock * kLanes<T>)),
        visible(arena.take<T>(kKeyBlock * kLanes<T>)),
        key_buffer(arena.take<T>(kKeyBlock * round_up_to_vector<T>(p.head_dim))),
        value_buffer(arena.take<T>(kKeyBlock * round_up_to_vector<T>(p.value_dim))),
        scale(arena.take<T>(kLanes<T>)) {}
};

// Strips of one (batch, kv head) against keys begin .. end - 1: every block is brought in once for all of
// them.
template <class T>
void forward_keys(const AttentionParams& p, const ForwardStrip<T>* strips, int64_t count, int64_t begin,
                  int64_t end, ForwardScratch<T>& scratch, bool leave_hidden_out) {
  if (count == 0) return;
  const int64_t batch = strips[0].batch, kv_head = p.kv_head(strips[0].head);
  for (int64_t key = begin / kKeyBlock * kKeyBlock; key < end; key += kKeyBlock) {
    const int64_t block = end - key < kKeyBlock ? end - key : kKeyBlock;
    const Rows<T> keys = rows_as<T>(p.key, batch, kv_head, key, block, p.head_dim, false, scratch.key_buffer);
    const Rows<T> values =
        rows_as<T>(p.value, batch, kv_head, key, block, p.value_dim, false, scratch.value_buffer);
    for (int64_t i = 0; i < count; ++i) {
      const ForwardStrip<T>& strip = strips[i];
      const int64_t rest = strip.keys.end - key;
      if (rest <= 0 || strip.keys.begin >= key + block) continue;
      const int64_t used = rest < block ? rest : block;
      if (!score_block(p, strip, key, used, keys, scratch.block, scratch.scores)) continue;
      if (leave_hidden_out) mark_visible(strip, used, scratch.scores, scratch.visible);
      softmax_block(strip, used, scratch.scores);
      if (p.dropout.enabled) apply_dropout(p.dropout, strip, key, used, scratch.scores);
      const Product<T> product{used,        values.data, values.stride,     scratch.scores, kLanes<T>,
                               strip.out_t, kLanes<T>,   Update::kScaleAdd, strip.rescale};
      if (leave_hidden_out) {
        multiply_visible<T, true>(product, p.value_dim, strip.vecs, scratch.visible, kLanes<T>);
      } else {
        multiply<T, true>(product, p.value_dim, strip.vecs);
      }
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
