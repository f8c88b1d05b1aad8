// The softmax weights themselves, from the statistics that the forward left: weights[q][k] = exp(s - row_max)
// / row_sum, after dropout. The only pass that writes O(queries * keys) memory, because its result is that
// large.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
struct WeightsTask {
  const AttentionParams& p;
  const WeightsOutputs& outputs;
  int64_t strips_per_head;

  WeightsTask(const AttentionParams& params, const WeightsOutputs& out)
      : p(params), outputs(out), strips_per_head((params.queries + kLanes<T> - 1) / kLanes<T>) {}
  int64_t items() const { return p.batch * p.heads * strips_per_head; }

  struct Scratch {
    Arena arena;
    BlockScratch<T> block;
    QueryStrip<T> strip;
    T *scores, *key_buffer, *row_max, *inverse_sum, *ones;

    static int64_t bytes(const AttentionParams& p) {
      return BlockScratch<T>::bytes(false) + Arena::bytes_for<T>(QueryStrip<T>::query_size(p)) +
             Arena::bytes_for<T>(kKeyBlock * kLanes<T>) +
             Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.head_dim)) +
             3 * Arena::bytes_for<T>(kLanes<T>);
    }
    explicit Scratch(const WeightsTask& task) : arena(bytes(task.p)), block(arena, false) {
      strip.query_t = arena.take<T>(QueryStrip<T>::query_size(task.p));
      scores = arena.take<T>(kKeyBlock * kLanes<T>);
      key_buffer = arena.take<T>(kKeyBlock * round_up_to_vector<T>(task.p.head_dim));
      row_max = arena.take<T>(kLanes<T>);
      inverse_sum = arena.take<T>(kLanes<T>);
      ones = arena.take<T>(kLanes<T>);
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) ones[lane] = T(1);
    }
  };

  void operator()(int64_t item, Scratch& s) const {
    const int64_t head_index = item / strips_per_head;
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t first = item % strips_per_head * kLanes<T>;
    const int64_t count = p.queries - first < kLanes<T> ? p.queries - first : kLanes<T>;
    s.strip.begin(p, batch, head, first, count);
    const int64_t row = head_index * p.queries + first;
    const T* maxima = static_cast<const T*>(outputs.row_max) + row;
    const T* sums = static_cast<const T*>(outputs.row_sum) + row;
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      const bool nothing = lane >= count || maxima[lane] == -std::numeric_limits<T>::infinity();
      s.row_max[lane] = nothing ? T(0) : maxima[lane];
      s.inverse_sum[lane] = lane >= count || sums[lane] == T(0) ? T(0) : T(1) / sums[lane];
    }
    for (int64_t key = 0; key < p.keys; key += kKeyBlock) {
      const int64_t block = p.keys - key < kKeyBlock ? p.keys - key : kKeyBlock;
      bool visible = key < s.strip.keys.end && key + block > s.strip.keys.begin;
      if (visible) {
        const Rows<T> keys =
            rows_as<T>(p.key, batch, p.kv_head(head), key, block, p.head_dim, false, s.key_buffer);
        visible = score_block<T>(p, s.strip, key, block, keys, s.block, s.scores);
      }
      if (visible) {
        normalise_block<T>(s.strip, block, s.row_max, s.inverse_sum, s.scores);
        if (p.dropout.enabled) apply_dropout<T>(p.dropout, s.strip, key, block, s.scores);
      } else {
        memset(s.scores, 0, static_cast<size_t>(block * kLanes<T>) * sizeof(T));
      }
      void* to = element(outputs.weights, p.dtype, row * p.keys + key);
      store_transposed<T>(to, p.dtype, p.keys, count, block, s.scores, kLanes<T>, s.ones);
    }
  }
};

template <class T>
void attention_weights(const AttentionParams& p, const WeightsOutputs& outputs, const ThreadPool& pool) {
  const WeightsTask<T> task(p, outputs);
  for_each_item(pool, task.items(), task);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
