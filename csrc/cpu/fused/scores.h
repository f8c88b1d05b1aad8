// The pass of attention_scores, the scaled dot product alone, and its gradients.
#pragma once

#include "score_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct ScoresTask {
  AttentionParams p;
  const View& scores;
  int64_t strips_per_head;

  explicit ScoresTask(const ScoresParams& s)
      : p(attention_of(s)), scores(s.scores), strips_per_head(divide_up(s.queries, kLanes<T>)) {}
  int64_t items() const { return p.batch * p.heads * strips_per_head; }

  struct Parts {
    QueryStrip<T> strip;
    RowOperand<T> keys;
    T *scores, *ones;

    SELFATTN_OUT_OF_LINE void allocate(const ScoresTask& task, Arena& arena) {
      strip.allocate(task.p, arena);
      keys.allocate(task.p, kKeyBlock, task.p.head_dim, arena);
      scores = arena.take<T>(kKeyBlock * kLanes<T>);
      ones = arena.take_filled<T>(kLanes<T>, T(1));
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t item, Scratch& s) const {
    const int64_t head_index = item / strips_per_head;
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t first = item % strips_per_head * kLanes<T>;
    const int64_t count = smaller(p.queries - first, kLanes<T>);
    s.strip.begin(p, batch, head, first, count);
    for (int64_t key = 0; key < p.keys; key += kKeyBlock) {
      const int64_t block = smaller(p.keys - key, kKeyBlock);
      s.keys.load(row_source(p.key, p.dtype, batch, p.kv_head(head), key, block, p.head_dim));
      dot_block<T>(s.strip, s.keys, 0, block, p.head_dim, s.scores);
      void* to = element(scores.data, p.dtype, scores.offset(batch, head, first) + key);
      store_transposed<T>(to, p.dtype, scores.stride[2], count, block, s.scores, kLanes<T>, s.ones);
    }
  }
};

// Both gradients are products of blocks of the incoming gradient, 64 x 64, with rows of the other input:
// dQ[q][e] = scale * sum_k g[q][k] K[k][e],  dK[k][e] = scale * sum_q g[q][k] Q[q][e], over the heads of the
// group.
template <class T, bool kKeyGradient>
struct ScoresGradientTask {
  const ScoresParams& p;
  int64_t heads, rows, depth;  // the result's heads and rows, and the terms of its sums
  int64_t blocks_per_head;

  explicit ScoresGradientTask(const ScoresParams& params)
      : p(params),
        heads(kKeyGradient ? params.kv_heads : params.heads),
        rows(kKeyGradient ? params.keys : params.queries),
        depth(kKeyGradient ? params.queries : params.keys),
        blocks_per_head(divide_up(rows, kKeyBlock)) {}
  int64_t items() const { return p.batch * heads * blocks_per_head; }

  struct Parts {
    int64_t stride;
    T *gradient, *other, *result;

    SELFATTN_OUT_OF_LINE void allocate(const ScoresGradientTask& task, Arena& arena) {
      stride = round_up_to_vector<T>(task.p.head_dim);
      gradient = arena.take<T>(kKeyBlock * kKeyBlock);
      other = arena.take<T>(kKeyBlock * stride);
      result = arena.take<T>(kKeyBlock * stride);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t item, Scratch& s) const {
    using S = Simd<T>;
    const int64_t head_index = item / blocks_per_head;
    const int64_t batch = head_index / heads, own_head = head_index % heads;
    const int64_t first = item % blocks_per_head * kKeyBlock;
    const int64_t count = smaller(rows - first, kKeyBlock);
    const int64_t group = p.heads / p.kv_heads;
    memset(s.result, 0, static_cast<size_t>(kKeyBlock * s.stride) * sizeof(T));
    for (int64_t i = 0; i < (kKeyGradient ? group : 1); ++i) {
      const int64_t head = kKeyGradient ? own_head * group + i : own_head;
      const View& other_view = kKeyGradient ? p.query : p.key;
      const int64_t other_head = kKeyGradient ? head : head / group;
      for (int64_t at = 0; at < depth; at += kKeyBlock) {
        const int64_t n = smaller(depth - at, kKeyBlock);
        const Rows<T> other =
            rows_as<T>(row_source(other_view, p.dtype, batch, other_head, at, n, p.head_dim), true, s.other);
        const int64_t query = kKeyGradient ? at : first, key = kKeyGradient ? first : at;
        View gradient = p.scores;
        gradient.data = element(gradient.data, gradient.dtype, key);
        const Rows<T> g = rows_as<T>(row_source(gradient, gradient.dtype, batch, head, query,
                                                kKeyGradient ? n : count, kKeyGradient ? count : n),
                                     false, s.gradient);
        multiply<T, kKeyGradient>(
            {n, g.data, g.stride, other.data, other.stride, s.result, s.stride, Update::kAdd, nullptr}, count,
            p.head_dim);
      }
    }
    const View& to = kKeyGradient ? p.grad_key : p.grad_query;
    for (int64_t row = 0; row < count; ++row) {
      void* out = element(to.data, p.dtype, to.offset(batch, own_head, first + row));
      for (int64_t e = 0; e < p.head_dim; e += S::kWidth) {
        store_row<T>(element(out, p.dtype, e), p.dtype, p.head_dim - e,
                     S::mul(S::load(s.result + row * s.stride + e), S::set(static_cast<T>(p.scale))));
      }
    }
  }
};

template <class T>
void scores_pass(const ScoresParams& p, const ThreadPool& pool) {
  const ScoresTask<T> task(p);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

template <class T>
void scores_backward_pass(const ScoresParams& p, const ThreadPool& pool) {
  const ScoresGradientTask<T, false> query_task(p);
  for_each_item(pool, query_task.items(), query_task, Items::kIndependent);
  const ScoresGradientTask<T, true> key_task(p);
  for_each_item(pool, key_task.items(), key_task, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
