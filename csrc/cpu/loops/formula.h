// The formula of one score and its weight. For query i and key j of one batch element b and head h:
//
//   s = scale · Σ_e q_ie k_je          dot product
//   s = softcap · tanh(s / softcap)    when softcap > 0
//   s = s − slope · |i + offset − j|   ALiBi
//   s = s + mask_ij                    float mask
//   P_ij = exp(s_ij − max_i) / sum_i   over the keys that i sees, and the sink
//   W_ij = P_ij · keep_ij              dropout
//
// T is the accumulation type of the other kernels; sums are in float64 for all dtypes, since each of them is
// one long chain here. Everything is computed anew for each (i, j), without tiles or reuse, so that there is
// little to get wrong. A key that the query may not see is never read.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../../core/attention_params.h"
#include "../../core/philox.h"
#include "../../core/sequences.h"
#include "../../core/visible_range.h"
#include "../parallel.h"

namespace selfattn::cpu::loops {

// Reads element (b, h, row, column) of a view.
template <class T>
T load(const View& view, int64_t b, int64_t h, int64_t row, int64_t column) {
  return load_element<T>(view.data, view.dtype, view.offset(b, h, row) + column * view.stride[3]);
}

template <class T>
void store(const View& view, int64_t b, int64_t h, int64_t row, int64_t column, T value) {
  store_element<T>(view.data, view.dtype, view.offset(b, h, row) + column * view.stride[3], value);
}

// Reads an element of the keys or values of a call, which may lie in pages.
template <class T>
T load_key(const AttentionParams& p, const View& view, int64_t b, int64_t kv_head, int64_t j,
           int64_t column) {
  return load_element<T>(view.data, view.dtype,
                         offset_of_key(view, p.pages, b, kv_head, j) + column * view.stride[3]);
}

// Returns false if a boolean mask holds False there, or a float mask −inf.
inline bool mask_shows(const View& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (mask.data == nullptr) return true;
  const double value = load<double>(mask, b, h, i, j);
  return mask.dtype == DType::kBool ? value != 0.0 : value != -std::numeric_limits<double>::infinity();
}

template <class T>
class Formula {
 public:
  Formula(const AttentionParams& params) : p(params) {
    if (p.dropout.enabled) {
      seed_ = static_cast<uint64_t>(*p.dropout.seed);
      threshold_ = dropout_threshold(p.dropout.probability);
      keep_scale_ = static_cast<T>(dropout_keep_scale(p.dropout.probability));
    }
  }

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const KeyRange range = visible_keys(p, i, i);
    return j >= range.begin && j < range.end && mask_shows(p.mask, b, h, i, j);
  }

  // Returns s before the softcap.
  T scaled_dot(int64_t b, int64_t h, int64_t i, int64_t j) const {
    double dot = 0;
    for (int64_t e = 0; e < p.head_dim; ++e) {
      dot += load<double>(p.query, b, h, i, e) * load_key<double>(p, p.key, b, p.kv_head(h), j, e);
    }
    return static_cast<T>(p.scale * dot);
  }

  T softcap(T s) const {
    if (p.softcap == 0.0) return s;
    const T cap = static_cast<T>(p.softcap);
    return cap * std::tanh(s / cap);
  }

  // d softcap(s) / ds
  T softcap_slope(T s) const {
    if (p.softcap == 0.0) return 1;
    const T t = std::tanh(s / static_cast<T>(p.softcap));
    return 1 - t * t;
  }

  // Returns what ALiBi adds for a slope of 1.
  T distance_bias(int64_t i, int64_t j) const {
    const int64_t distance = i + p.query_offset - j;
    return -static_cast<T>(distance < 0 ? -distance : distance);
  }

  // Returns the finished score from its scaled dot product.
  T score(int64_t b, int64_t h, int64_t i, int64_t j, T scaled_dot) const {
    T s = softcap(scaled_dot);
    if (p.alibi_slopes.data != nullptr) s += coefficient(p.alibi_slopes, b, h) * distance_bias(i, j);
    if (p.mask.data != nullptr && p.mask.dtype != DType::kBool) s += load<T>(p.mask, b, h, i, j);
    return s;
  }

  T score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return score(b, h, i, j, scaled_dot(b, h, i, j));
  }

  // Returns exp(score − row_max). A visible score of −inf has weight 0, even if every score is −inf.
  static T exponential(T score, T row_max) {
    return score == -std::numeric_limits<T>::infinity() ? T(0) : std::exp(score - row_max);
  }

  // A sink takes part in the maximum and the sum of each row; −inf stands for no sink.
  T sink(int64_t b, int64_t h) const {
    return p.sinks.data != nullptr ? coefficient(p.sinks, b, h) : -std::numeric_limits<T>::infinity();
  }

  // Returns the factor of dropout for a weight: 1 when it is off, else 0 or 1/(1 − probability).
  T keep(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!p.dropout.enabled) return 1;
    const DropoutOrigin at = dropout_origin(p.dropout);
    const Philox4 words =
        philox(seed_, at.key_group + static_cast<uint32_t>(j >> 2), at.query + static_cast<uint32_t>(i),
               at.head + static_cast<uint32_t>(h), at.batch + static_cast<uint32_t>(b));
    return words.word[j & 3] < threshold_ ? T(0) : keep_scale_;
  }

  static T coefficient(const HeadScalars& scalars, int64_t b, int64_t h) {
    return static_cast<const T*>(scalars.data)[b * scalars.batch_stride + h * scalars.head_stride];
  }

  const AttentionParams& p;

 private:
  uint64_t seed_ = 0;
  uint64_t threshold_ = 0;
  T keep_scale_ = 1;
};

// The (batch, head, row) that a flat work item stands for.
struct RowIndex {
  int64_t b, h, i;
  RowIndex(int64_t item, int64_t heads, int64_t rows)
      : b(item / (heads * rows)), h(item / rows % heads), i(item % rows) {}
};

// Runs Task<float> or Task<double>, whichever is the accumulation type, for a number of items, or for all
// rows of queries.
template <template <class> class Task, class Params, class... Arguments>
void run_items(int64_t items, const ThreadPool& pool, const Params& p, const Arguments&... arguments) {
  if (p.dtype == DType::kFloat64) {
    for_each_item(pool, items, Task<double>{p, arguments...});
  } else {
    for_each_item(pool, items, Task<float>{p, arguments...});
  }
}
template <template <class> class Task, class Params, class... Arguments>
void run_rows(const ThreadPool& pool, const Params& p, const Arguments&... arguments) {
  run_items<Task>(p.batch * p.heads * p.queries, pool, p, arguments...);
}

// The scratch of tasks that need no memory of their own.
struct NoScratch {
  template <class Task>
  explicit NoScratch(const Task&) {}
};

}  // namespace selfattn::cpu::loops
