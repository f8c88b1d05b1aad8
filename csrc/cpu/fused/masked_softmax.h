// The pass of masked_softmax: scale, mask and softmax of given scores, and its gradient. Rows lie along the
// lanes here: there is nothing to multiply, and so nothing to transpose.
#pragma once

#include "../products/operands.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct SoftmaxTask {
  static constexpr int64_t kRowsPerItem = 16;

  const SoftmaxParams& p;
  bool backward;
  int64_t rows;

  SoftmaxTask(const SoftmaxParams& params, bool is_backward)
      : p(params), backward(is_backward), rows(params.batch * params.heads * params.queries) {}
  int64_t items() const { return divide_up(rows, kRowsPerItem); }

  struct Parts {
    T* row;
    SELFATTN_OUT_OF_LINE void allocate(const SoftmaxTask& task, Arena& arena) {
      row = arena.take<T>(round_up_to_vector<T>(task.p.keys));
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t item, Scratch& s) const {
    const int64_t end = smaller((item + 1) * kRowsPerItem, rows);
    for (int64_t row = item * kRowsPerItem; row < end; ++row) {
      const int64_t query = row % p.queries, head = row / p.queries % p.heads,
                    batch = row / p.queries / p.heads;
      if (backward) {
        gradient_row(batch, head, query, s.row);
      } else {
        weights_row(batch, head, query, s.row);
      }
    }
  }

  // Loads scale * score, masked, -inf where hidden and past the last key.
  void load_scores(int64_t batch, int64_t head, int64_t query, T* row) const {
    using S = Simd<T>;
    const T hidden = -std::numeric_limits<T>::infinity();
    const void* scores = element(p.scores.data, p.dtype, p.scores.offset(batch, head, query));
    for (int64_t j = 0; j < p.keys; j += S::kWidth) {
      const auto x = load_row<T>(element(scores, p.dtype, j), p.dtype, p.keys - j);
      S::store(row + j, S::mul(x, S::set(static_cast<T>(p.scale))));
    }
    if (p.mask.data != nullptr) {
      const int64_t at = p.mask.offset(batch, head, query);
      const bool boolean = p.mask.dtype == DType::kBool;
      for (int64_t j = 0; j < p.keys; ++j) {
        const T x = load_element<T>(p.mask.data, p.mask.dtype, at + j * p.mask.stride[3]);
        if (boolean ? x == T(0) : x == hidden) {
          row[j] = hidden;
        } else if (!boolean) {
          row[j] += x;
        }
      }
    }
    int64_t end = p.keys;
    if (p.window_right >= 0) end = clamp_key(query + p.query_offset + p.window_right + 1, p.keys);
    for (int64_t j = end; j < round_up_to_vector<T>(p.keys); ++j) row[j] = hidden;
  }

  void weights_row(int64_t batch, int64_t head, int64_t query, T* row) const {
    using S = Simd<T>;
    load_scores(batch, head, query, row);
    const int64_t padded = round_up_to_vector<T>(p.keys);
    auto most = S::set(-std::numeric_limits<T>::infinity());
    for (int64_t j = 0; j < padded; j += S::kWidth) most = S::max(S::load(row + j), most);
    T lanes[S::kWidth];
    S::store(lanes, most);
    T row_max = lanes[0];
    for (int i = 1; i < S::kWidth; ++i) row_max = lanes[i] > row_max ? lanes[i] : row_max;
    if (row_max == -std::numeric_limits<T>::infinity()) row_max = T(0);

    auto sum = S::set(T(0));
    for (int64_t j = 0; j < padded; j += S::kWidth) {
      const auto weight = exp_nonpositive<T>(S::sub(S::load(row + j), S::set(row_max)));
      S::store(row + j, weight);
      sum = S::add(sum, weight);
    }
    S::store(lanes, sum);
    T row_sum = 0;
    for (int i = 0; i < S::kWidth; ++i) row_sum += lanes[i];
    const auto inverse = S::set(row_sum == T(0) ? T(0) : T(1) / row_sum);
    void* result = element(p.result.data, p.dtype, p.result.offset(batch, head, query));
    for (int64_t j = 0; j < p.keys; j += S::kWidth) {
      store_row<T>(element(result, p.dtype, j), p.dtype, p.keys - j, S::mul(S::load(row + j), inverse));
    }
  }

  // Computes scale * P * (g - rowsum(P * g)); a weight of 0 has gradient 0 whatever g holds there.
  void gradient_row(int64_t batch, int64_t head, int64_t query, T* row) const {
    using S = Simd<T>;
    const auto zero = S::set(T(0));
    const void* weights = element(p.scores.data, p.dtype, p.scores.offset(batch, head, query));
    const void* grad = element(p.grad.data, p.dtype, p.grad.offset(batch, head, query));
    auto sum = zero;
    for (int64_t j = 0; j < p.keys; j += S::kWidth) {
      const auto w = load_row<T>(element(weights, p.dtype, j), p.dtype, p.keys - j);
      const auto g = load_row<T>(element(grad, p.dtype, j), p.dtype, p.keys - j);
      const auto kept = S::select(S::equal(w, zero), zero, g);
      S::store(row + j, kept);
      sum = S::fma(w, kept, sum);
    }
    T lanes[S::kWidth];
    S::store(lanes, sum);
    T total = 0;
    for (int i = 0; i < S::kWidth; ++i) total += lanes[i];
    void* result = element(p.result.data, p.dtype, p.result.offset(batch, head, query));
    for (int64_t j = 0; j < p.keys; j += S::kWidth) {
      const auto w = load_row<T>(element(weights, p.dtype, j), p.dtype, p.keys - j);
      const auto g = S::sub(S::load(row + j), S::set(total));
      const auto d = S::mul(S::mul(w, S::set(static_cast<T>(p.scale))), g);
      store_row<T>(element(result, p.dtype, j), p.dtype, p.keys - j, S::select(S::equal(w, zero), zero, d));
    }
  }
};

template <class T>
void masked_softmax_pass(const SoftmaxParams& p, const ThreadPool& pool) {
  const SoftmaxTask<T> task(p, false);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

template <class T>
void masked_softmax_backward_pass(const SoftmaxParams& p, const ThreadPool& pool) {
  const SoftmaxTask<T> task(p, true);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
