// Decoding between its two products, row by row: options, softmax, dropout. A row is one query of one head
// against a block of keys, the keys side by side. score_block.h does the same for strips with the queries
// side by side, by the same operations in the same order, because other passes compute the same scores again
// there.
#pragma once

#include "overflow.h"
#include "score_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct DecodeRow {
  int64_t batch, head, query;
};

// Returns the largest lane, in all lanes.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec largest_lane(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  SELFATTN_UNROLL
  for (int i = 1; i < S::kWidth; i *= 2) x = S::max(S::interleave_low(x, x), S::interleave_high(x, x));
  return x;
}

// Returns the sum of the lanes, in all lanes.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec sum_of_lanes(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  SELFATTN_UNROLL
  for (int i = 1; i < S::kWidth; i *= 2) x = S::add(S::interleave_low(x, x), S::interleave_high(x, x));
  return x;
}

template <class T>
SELFATTN_INLINE T first_lane(typename Simd<T>::Vec x) {
  T lanes[Simd<T>::kWidth];
  Simd<T>::store(lanes, x);
  return lanes[0];
}

// Loads the mask of keys key .. key + keys - 1 as numbers to add: -inf for hidden keys and, up to a whole
// vector, for those past the last key. Returns whether any key is visible.
template <class T>
bool load_mask_row(const AttentionParams& p, const DecodeRow& row, int64_t key, int64_t keys, T* bias) {
  using S = Simd<T>;
  const int64_t key_stride = p.mask.stride[3];
  const void* source =
      element(p.mask.data, p.mask.dtype, p.mask.offset(row.batch, row.head, row.query) + key * key_stride);
  const int64_t whole = key_stride == 1 ? keys / S::kWidth * S::kWidth : 0;
  int64_t j = 0;
  if (p.mask.dtype != DType::kBool) {
    for (; j < whole; j += S::kWidth) {
      S::store(bias + j, load_row<T>(element(source, p.mask.dtype, j), p.mask.dtype, S::kWidth));
    }
  } else {
    for (; j < whole; j += S::kWidth)
      S::store(bias + j, S::load_bool_bias(static_cast<const uint8_t*>(source) + j));
  }
  for (; j < keys; ++j) bias[j] = mask_bias<T>(source, p.mask.dtype, j * key_stride);
  for (; j < round_up_to_vector<T>(keys); ++j) bias[j] = -std::numeric_limits<T>::infinity();
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  auto seen = hidden;  // 0 where a key is visible
  for (j = 0; j < keys; j += S::kWidth) {
    seen = S::select(S::equal(S::load(bias + j), hidden), seen, S::set(T(0)));
  }
  return S::any(S::less(hidden, seen));
}

// Returns the distances of a query from a vector of keys; `first` is that from the first one, with its sign.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec distances(int64_t first) {
  using S = Simd<T>;
  T numbers[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) numbers[i] = static_cast<T>(first - i);
  return S::abs(S::load(numbers));
}

// Turns the row's dot products with a block of keys into its final scores, -inf where hidden and, up to a
// whole vector, past the last key. `bias` is the row's mask, nullptr if there is none.
template <class T>
void finish_row(const AttentionParams& p, const DecodeRow& row, int64_t key, int64_t keys, const T* bias,
                T* s) {
  using S = Simd<T>;
  const KeyRange range = visible_keys(p, row.query, row.query);
  const int64_t begin = clamp_key(range.begin - key, keys), end = clamp_key(range.end - key, keys);
  const int64_t padded = round_up_to_vector<T>(keys);
  const bool windowed = begin > 0 || end < padded;
  const bool capped = p.softcap > 0.0;
  const bool sloped = p.alibi_slopes.data != nullptr;
  if (bias == nullptr && !windowed && !capped && !sloped) return;

  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  const auto cap = S::set(static_cast<T>(p.softcap));
  const auto inverse_cap = S::set(static_cast<T>(capped ? 1.0 / p.softcap : 0.0));
  const auto slope = S::set(sloped ? head_scalar<T>(p.alibi_slopes, row.batch, row.head) : T(0));
  const auto from = S::set(static_cast<T>(begin)), to = S::set(static_cast<T>(end));
  T numbers[S::kWidth];
  for (int64_t j = 0; j < padded; j += S::kWidth) {
    auto x = S::load(s + j);
    if (capped) x = S::mul(cap, tanh<T>(S::mul(x, inverse_cap)));
    if (sloped) x = S::sub(x, S::mul(slope, distances<T>(row.query + p.query_offset - key - j)));
    if (bias != nullptr) {
      const auto b = S::load(bias + j);
      x = S::select(S::equal(b, hidden), hidden, S::add(x, b));
    }
    if (windowed) {
      for (int i = 0; i < S::kWidth; ++i) numbers[i] = static_cast<T>(j + i);
      const auto index = S::load(numbers);
      x = S::select(S::less(index, to), S::select(S::less(index, from), hidden, x), hidden);
    }
    S::store(s + j, x);
  }
}

// The running softmax of a row. `top` and `mean` are as in ForwardStrip.
template <class T>
struct RowSoftmax {
  T max, sum, top, mean;

  // An attention sink is a score without a value, from which the softmax starts; -inf is none.
  static RowSoftmax of_sink(T sink) {
    constexpr T kNothing = -std::numeric_limits<T>::infinity();
    return {sink, sink == kNothing ? T(0) : T(1), kNothing, T(0)};
  }
};

// Turns scores into unnormalised weights in place, updates the row's softmax, and sets the factor for what
// has been summed up before.
template <class T, Statistics kStatistics>
SELFATTN_INLINE void softmax_row(int64_t keys, T* s, RowSoftmax<T>* row, T* rescale) {
  using S = Simd<T>;
  const auto nothing = S::set(-std::numeric_limits<T>::infinity());
  const auto old_max = S::set(row->max);
  auto most = kStatistics == Statistics::kAll ? nothing : old_max;
  for (int64_t j = 0; j < keys; j += S::kWidth) most = S::max(S::load(s + j), most);
  most = largest_lane<T>(most);
  if constexpr (kStatistics == Statistics::kAll) {
    row->top = first_lane<T>(S::max(most, S::set(row->top)));
    most = S::max(most, old_max);
  }
  // If nothing has been visible yet, subtracting -inf would make NaN of -inf scores.
  const auto shift = S::select(S::equal(most, nothing), S::set(T(0)), most);
  auto sum = S::set(T(0)), mean = sum;
  for (int64_t j = 0; j < keys; j += S::kWidth) {
    const auto score = S::load(s + j), weight = exp_nonpositive<T>(S::sub(score, shift));
    S::store(s + j, weight);
    sum = S::add(sum, weight);
    if constexpr (kStatistics == Statistics::kAll) {
      mean = S::fma(weight, finite_difference<T>(score, shift), mean);
    }
  }
  const auto factor = exp_nonpositive<T>(S::sub(old_max, shift));
  if constexpr (kStatistics == Statistics::kAll) {
    const auto before = S::fma(S::set(row->sum), finite_difference<T>(old_max, shift), S::set(row->mean));
    row->mean = first_lane<T>(S::fma(before, factor, sum_of_lanes<T>(mean)));
  }
  row->sum = first_lane<T>(S::fma(S::set(row->sum), factor, sum_of_lanes<T>(sum)));
  row->max = first_lane<T>(most);
  *rescale = first_lane<T>(factor);
}

// Sets visible[key] to 0 where the score is -inf, and to 1 elsewhere; see multiply_visible.
template <class T>
void mark_visible_row(int64_t keys, const T* s, T* visible) {
  using S = Simd<T>;
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < keys; j += S::kWidth) {
    S::store(visible + j, S::select(S::equal(S::load(s + j), hidden), S::set(T(0)), S::set(T(1))));
  }
}

// Multiplies the row's weights by 0 or 1/(1-p), up to a whole vector. `key` is a multiple of 4.
template <class T>
void drop_row(const Dropout& dropout, const DecodeRow& row, int64_t key, int64_t keys, T* weights) {
  using S = Simd<T>;
  const RowDropout<T> pattern(dropout, row.batch, row.head, row.query, keep_scale<T>(dropout));
  for (int64_t j = 0; j < keys; j += 4 * S::kWidth) {
    typename S::Vec factor[4];
    pattern.factors(key + j, factor);
    for (int64_t i = 0; i < 4 && j + i * S::kWidth < keys; ++i) {
      T* at = weights + j + i * S::kWidth;
      S::store(at, S::mul(S::load(at), factor[i]));
    }
  }
}

// Divides a query's unnormalised output by the sum of its weights, and writes its results.
template <class T>
SELFATTN_OUT_OF_LINE void store_query(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch,
                                      int64_t head, int64_t query, const RowSoftmax<T>& softmax,
                                      const T* out) {
  using S = Simd<T>;
  const int64_t row = p.row(batch, head, query);
  static_cast<T*>(outputs.row_max)[row] = softmax.max;
  static_cast<T*>(outputs.row_sum)[row] = softmax.sum;
  if (outputs.row_mean != nullptr) {
    static_cast<T*>(outputs.row_top)[row] = softmax.top;
    static_cast<T*>(outputs.row_mean)[row] = softmax.sum == T(0) ? T(0) : softmax.mean / softmax.sum;
  }
  const auto scale = S::set(softmax.sum == T(0) ? T(0) : T(1) / softmax.sum);
  const int64_t at = outputs.out.offset(batch, head, query);
  auto zero = S::set(T(0));  // NaN as soon as a result is not finite
  for (int64_t e = 0; e < p.value_dim; e += S::kWidth) {
    const auto result = S::mul(S::load(out + e), scale);
    zero = S::fma(result, S::set(T(0)), zero);
    store_with_residual<T>(outputs.out.data, outputs.out_residual, p.dtype, at + e, p.value_dim - e, result);
  }
  if (!all_zero<T>(zero)) mend_overflow<T>(p, outputs, batch, head, query, 1);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
