// Products for strips of very few queries, as in generating text one token at a time. Lanes that run over
// queries would be empty, so here they run over the head dim: a score is a dot product, an output row is a
// sum of scaled value rows. Keys and values are read once, in order, and nothing is done with them but one
// multiply-add per element and query.
#pragma once

#include "rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Up to here a dot product per query beats a vector of mostly empty lanes.
constexpr int64_t kThinQueries = 4;

// s[key][query] for `queries` rows of `query` ([queries][padded head_dim], zeros in the padding); 0 in the
// other lanes of the vectors, which every later step passes over as well.
template <class T>
void thin_scores(const T* query, int64_t queries, const T* keys, int64_t key_stride, int64_t count,
                 int64_t head_dim, T* s, int64_t ld) {
  using S = Simd<T>;
  const int64_t padded = round_up_to_vector<T>(head_dim), whole = head_dim / S::kWidth * S::kWidth;
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t lane = queries; lane < round_up_to_vector<T>(queries); ++lane) s[j * ld + lane] = T(0);
  }
  for (int64_t j = 0; j < count; j += S::kWidth) {
    const int64_t n = count - j < S::kWidth ? count - j : S::kWidth;
    for (int64_t q = 0; q < queries; ++q) {
      const T* row = query + q * padded;
      typename S::Vec sums[S::kWidth];
      for (int64_t i = 0; i < S::kWidth; ++i) {
        // Two chains hide half of the latency; the keys' own independence hides the rest.
        auto even = S::set(T(0)), odd = even;
        if (i < n) {
          const T* k = keys + (j + i) * key_stride;
          int64_t e = 0;
          for (; e + 2 * S::kWidth <= whole; e += 2 * S::kWidth) {
            even = S::fma(S::load(k + e), S::load(row + e), even);
            odd = S::fma(S::load(k + e + S::kWidth), S::load(row + e + S::kWidth), odd);
          }
          for (; e < head_dim; e += S::kWidth) {
            even = S::fma(load_row<T>(k + e, dtype_of<T>(), head_dim - e), S::load(row + e), even);
          }
        }
        sums[i] = S::add(even, odd);
      }
      transpose<T>(sums);  // now lane i of all vectors together holds the parts of key i
      SELFATTN_UNROLL
      for (int half = S::kWidth / 2; half > 0; half /= 2) {
        SELFATTN_UNROLL
        for (int i = 0; i < half; ++i) sums[i] = S::add(sums[i], sums[i + half]);
      }
      T scores[S::kWidth];
      S::store(scores, sums[0]);
      for (int64_t i = 0; i < n; ++i) s[(j + i) * ld + q] = scores[i];
    }
  }
}

// out[query][padded value_dim] = out * rescale[query] + sum over keys of weights[key][query] * V[key]. Where
// `visible` is given (laid out as weights), keys with 0 there are left out; see multiply_visible.
template <class T>
void thin_values(const T* weights, const T* visible, int64_t ld, int64_t queries, const T* values,
                 int64_t value_stride, int64_t count, int64_t value_dim, const T* rescale, T* out) {
  using S = Simd<T>;
  constexpr int kVecs = 8;  // accumulators of one pass over the block
  const int64_t padded = round_up_to_vector<T>(value_dim);
  for (int64_t q = 0; q < queries; ++q) {
    const auto scale = S::set(rescale[q]);
    T* row = out + q * padded;
    int64_t e = 0;
    for (; e + kVecs * S::kWidth <= value_dim; e += kVecs * S::kWidth) {
      typename S::Vec sums[kVecs];
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[v] = S::set(T(0));
      for (int64_t j = 0; j < count; ++j) {
        if (visible != nullptr && visible[j * ld + q] == T(0)) continue;
        const auto weight = S::set(weights[j * ld + q]);
        SELFATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          sums[v] = S::fma(weight, S::load(values + j * value_stride + e + v * S::kWidth), sums[v]);
        }
      }
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        S::store(row + e + v * S::kWidth, S::fma(S::load(row + e + v * S::kWidth), scale, sums[v]));
      }
    }
    for (; e < value_dim; e += S::kWidth) {
      typename S::Vec sums[2] = {S::set(T(0)), S::set(T(0))};  // even and odd keys
      for (int64_t j = 0; j < count; j += 2) {
        SELFATTN_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (j + i >= count || (visible != nullptr && visible[(j + i) * ld + q] == T(0))) continue;
          const auto v = load_row<T>(values + (j + i) * value_stride + e, dtype_of<T>(), value_dim - e);
          sums[i] = S::fma(S::set(weights[(j + i) * ld + q]), v, sums[i]);
        }
      }
      S::store(row + e, S::fma(S::load(row + e), scale, S::add(sums[0], sums[1])));
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
