// The component that all keys share, and its part of dQ. dS of a row sums up to 0, and so this part is 0. But
// dS rounded to one bfloat16 does not, nor does dS from an output of rounded weights: keys of 120 and a
// spread of 1 gave dQ errors of a quarter of its size. What a row of dS sums up to is therefore taken away
// again, times what the keys share.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
class CommonKeys {
  using T = Scalar<P>;

 public:
  static int64_t bytes(const AttentionParams& p) { return 4 * Arena::bytes_for<T>(padded(p.head_dim)); }
  void allocate(const AttentionParams& p, Arena& arena) {
    for (T** row : {&row_, &least_, &most_, &sum_}) *row = arena.take<T>(padded(p.head_dim));
  }

  // Whether dS is rounded, and by the call's options a row of it sums up to 0 and sees the first keys.
  static bool takes(const AttentionParams& p, const BackwardArguments& a) {
    return rounds_gradients<P>(p) && p.mask.data == nullptr && p.softcap == 0.0 && p.sinks.data == nullptr &&
           a.grad_row == nullptr && a.grad_weights.data == nullptr && p.window_left < 0;
  }

  // All keys of a head.
  void begin(const RowSource& keys) {
    keys_ = keys;
    count_ = 0;
  }

  // Whether take_out has something to do for the strip that begins with a query.
  bool any_for(const AttentionParams& p, int64_t first) { return !sample(p, first) || any_; }

  // Takes sums[lane] times what the keys share from dQ^T of a strip.
  void take_out(const AttentionParams& p, int64_t first, int64_t count, const T* sums, T* grad_query_t) {
    if (sample(p, first)) {
      for (int64_t e = 0; e < p.head_dim; ++e) {
        const T component = common(e);
        if (component == T(0)) continue;
        T* to = grad_query_t + e * kLanes<P>;
        for (int64_t lane = 0; lane < count; ++lane) to[lane] -= sums[lane] * component;
      }
      return;
    }
    forget();
    for (int64_t lane = 0; lane < count; ++lane) {
      for (const int64_t end = keys_of(p, first + lane); count_ < end;) add(count_);
      for (int64_t e = 0; count_ > 0 && e < p.head_dim; ++e) {
        const T component = common(e);
        if (component != T(0)) grad_query_t[e * kLanes<P> + lane] -= sums[lane] * component;
      }
    }
    count_ = 0;
  }

 private:
  static constexpr int64_t kSample = 16;

  RowSource keys_;
  T *row_, *least_, *most_, *sum_;
  int64_t count_;    // of how many keys they are
  int64_t sampled_;  // and from how many
  bool any_;         // whether these share anything

  static int64_t padded(int64_t columns) { return round_up_to_vector<T>(columns); }
  static int64_t keys_of(const AttentionParams& p, int64_t query) {
    return visible_keys(p, query, query).end;
  }

  // Looks at a sample of the keys that the first query of a strip sees, and so do all others: of a power of
  // two of keys, so that many strips have the same. False if there are too few; then each query counts all
  // that it sees.
  bool sample(const AttentionParams& p, int64_t first) {
    const int64_t seen = keys_of(p, first);
    if (seen < kSample) return false;
    int64_t from = kSample;
    while (2 * from <= seen) from *= 2;
    if (count_ == kSample && sampled_ == from) return true;
    forget();
    for (int64_t i = 0; i < kSample; ++i) add((2 * i + 1) * from / (2 * kSample));
    sampled_ = from;
    any_ = false;
    for (int64_t e = 0; e < p.head_dim; ++e) any_ |= common(e) != T(0);
    return true;
  }
  void forget() {
    count_ = 0;
    for (int64_t e = 0; e < padded(keys_.columns); ++e) {
      least_[e] = std::numeric_limits<T>::infinity();
      most_[e] = -least_[e];
      sum_[e] = T(0);
    }
  }
  void add(int64_t key) {
    ++count_;
    load_padded_row<T>(row_, element(keys_.data, keys_.dtype, key * keys_.stride), keys_.dtype, keys_.columns,
                       T(1));
    for (int64_t e = 0; e < padded(keys_.columns); ++e) {
      least_[e] = row_[e] < least_[e] ? row_[e] : least_[e];
      most_[e] = row_[e] > most_[e] ? row_[e] : most_[e];
      sum_[e] += row_[e];
    }
  }
  // Of a column: the mean of keys of one sign and like size, otherwise 0.
  T common(int64_t e) const {
    const bool alike =
        (least_[e] > T(0) && most_[e] <= 4 * least_[e]) || (most_[e] < T(0) && least_[e] >= 4 * most_[e]);
    return alike ? sum_[e] / static_cast<T>(count_) : T(0);
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
