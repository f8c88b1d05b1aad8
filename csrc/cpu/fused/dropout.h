// Dropout of a block of weights, by vectors of the random numbers of core/philox.h.
#pragma once

#include "query_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
T keep_scale(const Dropout& dropout) {
  return static_cast<T>(dropout_keep_scale(dropout.probability));
}

// Turns the words of Philox into factors of weights: 0 or `keep`.
template <class T>
class DropoutFactors {
  using S = Simd<T>;
  using Words = typename S::Words;

 public:
  DropoutFactors(const Dropout& dropout, T keep_factor) : keep(keep_factor) {
    const uint64_t seed = static_cast<uint64_t>(*dropout.seed);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1) {
      key0[round] = k0;
      key1[round] = k1;
    }
    // A threshold of 2^32 drops everything, and does not fit; its factor of 0 drops everything as well.
    const uint64_t exact = dropout_threshold(dropout.probability);
    threshold = exact > 0xffffffffu ? 0xffffffffu : static_cast<uint32_t>(exact);
  }

 protected:
  uint32_t key0[kPhiloxRounds], key1[kPhiloxRounds], threshold;
  T keep;

  static uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
  static uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }

  // Computes the rounds from kFrom on, for counters whose first two words are the same in all lanes.
  template <int kFrom>
  SELFATTN_INLINE void finish(uint32_t same0, uint32_t same1, Words c2, Words c3,
                              typename S::Vec (&factor)[4]) const {
    const uint64_t same_product = static_cast<uint64_t>(kPhiloxMultiplier0) * same0;
    const Words none = S::words(0);
    Words c1 = S::multiply_words(c2, kPhiloxMultiplier1);
    Words c0 = S::xor_words(S::high_words(c1), none, same1 ^ key0[kFrom]);
    c2 = S::xor_words(c3, none, high(same_product) ^ key1[kFrom]);
    c3 = S::words(low(same_product));
    SELFATTN_UNROLL
    for (int round = kFrom + 1; round < kPhiloxRounds; ++round) {
      const Words p0 = S::multiply_words(c0, kPhiloxMultiplier0);
      const Words p1 = S::multiply_words(c2, kPhiloxMultiplier1);
      c0 = S::xor_words(S::high_words(p1), c1, key0[round]);
      c2 = S::xor_words(S::high_words(p0), c3, key1[round]);
      c1 = p1;
      c3 = p0;
    }
    const auto zero = S::set(T(0)), kept = S::set(keep);
    factor[0] = S::select(S::words_below(c0, threshold), zero, kept);
    factor[1] = S::select(S::words_below(c1, threshold), zero, kept);
    factor[2] = S::select(S::words_below(c2, threshold), zero, kept);
    factor[3] = S::select(S::words_below(c3, threshold), zero, kept);
  }
};

// Dropout of a strip, with keys down the rows and queries across the lanes. Only the query differs between
// lanes, so that the first two rounds need a single product of vectors, which serves all keys.
template <class P>
class StripDropout : DropoutFactors<Scalar<P>> {
  using T = Scalar<P>;
  using S = Simd<T>;
  using Base = DropoutFactors<T>;
  using Words = typename S::Words;

 public:
  StripDropout(const Dropout& dropout, const QueryStrip<P>& strip, T keep_factor)
      : Base(dropout, keep_factor),
        origin(dropout_origin(dropout)),
        batch(origin.batch + static_cast<uint32_t>(strip.batch)) {
    head_product =
        static_cast<uint64_t>(kPhiloxMultiplier1) * (origin.head + static_cast<uint32_t>(strip.head));
    const uint32_t same = Base::high(head_product) ^ this->key0[0];
    for (int64_t v = 0; v < strip.vecs; ++v) {
      const Words query = S::words_from(origin.query + static_cast<uint32_t>(strip.first + v * S::kWidth));
      query_product[v] = S::multiply_words(S::xor_words(query, S::words(0), same), kPhiloxMultiplier0);
    }
  }

  // Sets the factors of keys key .. key + 3 for the lanes of vector v; key is a multiple of 4.
  SELFATTN_INLINE void factors(int64_t key, int64_t v, typename S::Vec (&factor)[4]) const {
    const uint64_t p0 =
        static_cast<uint64_t>(kPhiloxMultiplier0) * (origin.key_group + static_cast<uint32_t>(key >> 2));
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * (Base::high(p0) ^ batch ^ this->key1[0]);
    const Words c2 =
        S::xor_words(S::high_words(query_product[v]), S::words(0), Base::low(p0) ^ this->key1[1]);
    this->template finish<2>(Base::high(p1) ^ Base::low(head_product) ^ this->key0[1], Base::low(p1), c2,
                             query_product[v], factor);
  }

 private:
  DropoutOrigin origin;
  uint32_t batch;
  uint64_t head_product;              // the product of the first round
  Words query_product[S::kTileVecs];  // those of the second round
};

// Multiplies blocks of weights, one or more, by 0 or `keep`. `key` is a multiple of 4.
template <class P, class... Blocks>
void apply_dropout(const Dropout& dropout, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                   Scalar<P> keep, Blocks*... weights) {
  using S = Simd<Scalar<P>>;
  const StripDropout<P> pattern(dropout, strip, keep);
  for (int64_t j = 0; j < keys; j += 4) {
    for (int64_t v = 0; v < strip.vecs; ++v) {
      typename S::Vec factor[4];
      pattern.factors(key + j, v, factor);
      for (int64_t i = 0; i < 4 && j + i < keys; ++i) {
        const int64_t at = (j + i) * kLanes<P> + v * S::kWidth;
        (S::store(weights + at, S::mul(S::load(weights + at), factor[i])), ...);
      }
    }
  }
}

// Dropout of one query, with keys across the lanes.
template <class T>
class RowDropout : DropoutFactors<T> {
  using S = Simd<T>;
  using Base = DropoutFactors<T>;

 public:
  RowDropout(const Dropout& dropout, int64_t batch_index, int64_t head, int64_t query_index, T keep_factor)
      : Base(dropout, keep_factor),
        origin(dropout_origin(dropout)),
        batch(origin.batch + static_cast<uint32_t>(batch_index)),
        query(origin.query + static_cast<uint32_t>(query_index)) {
    head_product = static_cast<uint64_t>(kPhiloxMultiplier1) * (origin.head + static_cast<uint32_t>(head));
  }

  // Sets the factors of keys key .. key + 4 * kWidth - 1, in order; key is a multiple of 4.
  SELFATTN_INLINE void factors(int64_t key, typename S::Vec (&factor)[4]) const {
    const auto groups = S::words_from(origin.key_group + static_cast<uint32_t>(key >> 2));
    const auto product = S::multiply_words(groups, kPhiloxMultiplier0);
    const auto c2 = S::xor_words(S::high_words(product), S::words(batch), this->key1[0]);
    typename S::Vec word[4];  // lane i belongs to the keys 4 * i .. 4 * i + 3
    this->template finish<1>(Base::high(head_product) ^ query ^ this->key0[0], Base::low(head_product), c2,
                             product, word);
    const auto even_low = S::interleave_low(word[0], word[2]), odd_low = S::interleave_low(word[1], word[3]);
    const auto even_high = S::interleave_high(word[0], word[2]);
    const auto odd_high = S::interleave_high(word[1], word[3]);
    factor[0] = S::interleave_low(even_low, odd_low);
    factor[1] = S::interleave_high(even_low, odd_low);
    factor[2] = S::interleave_low(even_high, odd_high);
    factor[3] = S::interleave_high(even_high, odd_high);
  }

 private:
  DropoutOrigin origin;
  uint32_t batch, query;
  uint64_t head_product;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
