// The masked softmax over the keys that a query sees and its backward, by loops. P = softmax(scale · S +
// mask); dS = scale · P ∘ (dP − Σ P dP).
#include <algorithm>

#include "formula.h"
#include "loops.h"

namespace selfattn::cpu::loops {

namespace {

template <class T>
struct SoftmaxTask {
  const SoftmaxParams& p;

  using Scratch = NoScratch;

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const bool in_window = p.window_right < 0 || j <= i + p.query_offset + p.window_right;
    return in_window && mask_shows(p.mask, b, h, i, j);
  }

  T score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const T s = static_cast<T>(p.scale) * load<T>(p.scores, b, h, i, j);
    return p.mask.data != nullptr && p.mask.dtype != DType::kBool ? s + load<T>(p.mask, b, h, i, j) : s;
  }

  void operator()(int64_t item, Scratch&) const {
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    T row_max = -std::numeric_limits<T>::infinity();
    for (int64_t j = 0; j < p.keys; ++j) {
      if (sees(b, h, i, j)) row_max = std::max(row_max, score(b, h, i, j));
    }
    T row_sum = 0;
    for (int64_t j = 0; j < p.keys; ++j) {
      if (sees(b, h, i, j)) row_sum += Formula<T>::exponential(score(b, h, i, j), row_max);
    }
    for (int64_t j = 0; j < p.keys; ++j) {
      const bool visible = row_sum != 0 && sees(b, h, i, j);
      store<T>(p.result, b, h, i, j,
               visible ? Formula<T>::exponential(score(b, h, i, j), row_max) / row_sum : T(0));
    }
  }
};

// A weight of 0 belongs to a hidden key, whose gradient must not matter even when it is NaN.
template <class T>
struct SoftmaxBackwardTask {
  const SoftmaxParams& p;

  using Scratch = NoScratch;

  void operator()(int64_t item, Scratch&) const {
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    T sum = 0;
    for (int64_t j = 0; j < p.keys; ++j) {
      const T weight = load<T>(p.scores, b, h, i, j);
      if (weight != 0) sum += weight * load<T>(p.grad, b, h, i, j);
    }
    for (int64_t j = 0; j < p.keys; ++j) {
      const T weight = load<T>(p.scores, b, h, i, j);
      const T grad = weight != 0 ? weight * (load<T>(p.grad, b, h, i, j) - sum) : T(0);
      store<T>(p.result, b, h, i, j, static_cast<T>(p.scale) * grad);
    }
  }
};

}  // namespace

void masked_softmax(const SoftmaxParams& p, const ThreadPool& pool) { run_rows<SoftmaxTask>(pool, p); }
void masked_softmax_backward(const SoftmaxParams& p, const ThreadPool& pool) {
  run_rows<SoftmaxBackwardTask>(pool, p);
}

}  // namespace selfattn::cpu::loops
