// The pass that writes the softmax weights, from the forward's statistics. weights[q][k] = exp(s - row_max) /
// row_sum, after dropout. It writes O(queries * keys) memory, because its result is that large.
#pragma once

#include "../products/key_rows.h"
#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
struct WeightsTask {
  using T = Scalar<P>;

  const AttentionParams& p;
  const WeightsOutputs& outputs;
  int64_t strips_per_head;

  WeightsTask(const AttentionParams& params, const WeightsOutputs& out)
      : p(params), outputs(out), strips_per_head(divide_up(params.queries, kLanes<P>)) {}
  int64_t items() const { return p.batch * p.heads * strips_per_head; }

  struct Parts {
    BlockScratch<P> block;
    QueryStrip<P> strip;
    RowOperand<P> keys;
    T *scores, *row_max, *inverse_sum, *ones;
    char* paged_keys;

    SELFATTN_OUT_OF_LINE void allocate(const WeightsTask& task, Arena& arena) {
      block.allocate(task.p, false, arena);
      strip.allocate(task.p, arena);
      keys.allocate(task.p, kKeyBlock, task.p.head_dim, arena);
      scores = arena.take<T>(kKeyBlock * kLanes<P>);
      row_max = arena.take<T>(kLanes<P>);
      inverse_sum = arena.take<T>(kLanes<P>);
      ones = arena.take_filled<T>(kLanes<P>, T(1));
      paged_keys = arena.take<char>(block_bytes(task.p, kKeyBlock, task.p.head_dim));
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    const int64_t head_index = item / strips_per_head;
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t first = item % strips_per_head * kLanes<P>;
    const int64_t count = smaller(p.queries - first, kLanes<P>);
    s.strip.begin(p, batch, head, first, count);
    const int64_t row = p.row(batch, head, first);
    const T* maxima = static_cast<const T*>(outputs.row_max) + row;
    const T* sums = static_cast<const T*>(outputs.row_sum) + row;
    for (int64_t lane = 0; lane < kLanes<P>; ++lane) {
      const bool nothing = lane >= count || maxima[lane] == -std::numeric_limits<T>::infinity();
      s.row_max[lane] = nothing ? T(0) : maxima[lane];
      s.inverse_sum[lane] = lane >= count || sums[lane] == T(0) ? T(0) : T(1) / sums[lane];
    }
    for (int64_t key = 0; key < p.keys; key += kKeyBlock) {
      const int64_t block = smaller(p.keys - key, kKeyBlock);
      T factor = T(1);
      bool visible = key < s.strip.keys.end && key + block > s.strip.keys.begin;
      if (visible) {
        s.keys.load(key_source(p, p.key, batch, p.kv_head(head), key, block, p.head_dim, s.paged_keys));
        visible = score_block<P>(p, s.strip, key, block, s.keys, 0, s.block, s.scores, &factor);
      }
      if (visible) {
        normalise_block<P>(p, s.strip, block, s.row_max, s.inverse_sum, factor, false, s.scores);
        if (p.dropout.enabled)
          apply_dropout<P>(p.dropout, s.strip, key, block, keep_scale<T>(p.dropout), s.scores);
      } else {
        memset(s.scores, 0, static_cast<size_t>(block * kLanes<P>) * sizeof(T));
      }
      const View& weights = outputs.weights;
      void* to = element(weights.data, p.dtype, weights.offset(batch, head, first) + key);
      store_transposed<T>(to, p.dtype, weights.stride[2], count, block, s.scores, kLanes<P>, s.ones);
    }
  }
};

template <class P>
void weights_pass(const AttentionParams& p, const WeightsOutputs& outputs, const ThreadPool& pool) {
  if (p.sequences.any()) {
    const auto calls = element_calls(p, outputs, 0, kAnyQueries);
    const auto joint = joint_task<WeightsTask<P>>(calls);
    return for_each_item(pool, joint.items(), joint, Items::kIndependent);
  }
  const WeightsTask<P> task(p, outputs);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
