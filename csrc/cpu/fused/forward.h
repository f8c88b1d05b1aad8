// The forward pass for many queries: its items are groups of neighbouring strips of one head.
#pragma once

#include "decode.h"
#include "forward_strip.h"
#include "overflow.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
struct ForwardTask {
  using T = Scalar<P>;

  const AttentionParams& p;
  const ForwardOutputs& outputs;
  int64_t strips_per_item;
  int64_t queries_per_item;
  int64_t items_per_head;
  bool ends_with_blocks;  // strips end where blocks of the function's map end, and so see fewer keys

  // Returns the number of all strips of the call.
  static int64_t strips(const AttentionParams& p) {
    return p.batch * p.heads * divide_up(p.queries, kLanes<P>);
  }

  ForwardTask(const AttentionParams& params, const ForwardOutputs& out, int64_t all_strips, int threads)
      : p(params), outputs(out) {
    const int64_t in_head = divide_up(p.queries, kLanes<P>);
    strips_per_item = smaller(strips_for(all_strips, threads), in_head);
    queries_per_item = strips_per_item * kLanes<P>;
    const BlockMap& map = p.function.map;
    const int64_t strips_of_block = map.blocks != nullptr ? divide_up(map.query_size, kLanes<P>) : 0;
    ends_with_blocks = map.query_size >= kLanes<P> && strips_of_block <= strips_per_item;
    if (ends_with_blocks) queries_per_item = strips_per_item / strips_of_block * map.query_size;
    items_per_head = divide_up(p.queries, queries_per_item);
  }

  // Returns the queries of the strip that begins with query `first`, in an item that ends with `end` - 1.
  int64_t queries_of_strip(int64_t first, int64_t end) const {
    const int64_t size = p.function.map.query_size;
    return strip_queries<P>(first, ends_with_blocks ? smaller(end, (first / size + 1) * size) : end);
  }

  // Returns the strips of an item. They share the blocks of keys and values that they pull through the cache,
  // and their conversion if the tensors do not hold T. There are as many as leave the threads enough items
  // and fit the level-2 cache; results do not depend on which strips share an item.
  int64_t strips_for(int64_t strips, int threads) const {
    const int64_t cached = smaller(kStripCache<P> / bytes_of<ForwardStrip<P>>(p), kMostStrips<P>);
    return larger(smaller(cached, strips / (4 * threads)), 2);
  }

  int64_t items() const { return p.batch * p.heads * items_per_head; }

  struct Parts {
    ForwardScratch<P> block;
    ForwardStrip<P> strips[kMostStrips<P>];

    SELFATTN_OUT_OF_LINE void allocate(const ForwardTask& task, Arena& arena) {
      block.allocate(task.p, arena);
      for (int64_t i = 0; i < task.strips_per_item; ++i) strips[i].allocate(task.p, arena);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& scratch) const {
    // Later queries see more keys under a causal mask, so the longest items go first. Heads go in the order
    // of memory, in which the processor fetches ahead.
    const int64_t all_heads = p.batch * p.heads;
    const int64_t head_index = item % all_heads, group = items_per_head - 1 - item / all_heads;
    const int64_t begin = group * queries_per_item;
    const int64_t end = smaller(begin + queries_per_item, p.queries);
    int64_t strips = 0;
    for (int64_t first = begin; first < end; ++strips) {
      const int64_t count = queries_of_strip(first, end);
      scratch.strips[strips].begin(p, head_index / p.heads, head_index % p.heads, first, count);
      scratch.strips[strips].has_statistics = outputs.row_mean != nullptr;
      first += count;
    }
    run(strips, scratch, false);
    bool finite = !scratch.block.large_values;
    if constexpr (kDirect<P>) {
      for (int64_t i = 0; i < strips; ++i) finite = finite && scratch.strips[i].finite(p);
      if (!finite) run(strips, scratch, true);
    } else {
      // The choice to mend a row must not depend on the values that other strips of the item have met.
      finite = finite && !p.batch_invariant;
    }
    for (int64_t i = 0; i < strips; ++i) {
      const ForwardStrip<P>& strip = scratch.strips[i];
      if (p.batch_invariant) strip.drop_signs_of_zeros(p);
      finish(strip, scratch.block.scale);
      if (finite || strip.finite(p)) continue;
      mend_overflow<T>(p, outputs, strip.batch, strip.head, strip.first, strip.count);
    }
  }

  void run(int64_t strips, Scratch& scratch, bool leave_hidden_out) const {
    KeyRange range{p.keys, 0};
    scratch.block.large_values = false;
    for (int64_t i = 0; i < strips; ++i) {
      scratch.strips[i].reset(p);
      range.begin = smaller(range.begin, scratch.strips[i].keys.begin);
      range.end = larger(range.end, scratch.strips[i].keys.end);
    }
    forward_keys<P>(p, scratch.strips, strips, range.begin, range.end, scratch.block, leave_hidden_out);
  }

  void finish(const ForwardStrip<P>& strip, T* scale) const {
    strip.inverse_sums(p, scale);
    const int64_t row = p.row(strip.batch, strip.head, strip.first);
    memcpy(static_cast<T*>(outputs.row_max) + row, strip.row_max,
           static_cast<size_t>(strip.count) * sizeof(T));
    memcpy(static_cast<T*>(outputs.row_sum) + row, strip.row_sum,
           static_cast<size_t>(strip.count) * sizeof(T));
    if (strip.has_statistics) {
      for (int64_t lane = 0; lane < strip.count; ++lane) {
        const T sum = strip.row_sum[lane];
        static_cast<T*>(outputs.row_top)[row + lane] = strip.row_top[lane];
        static_cast<T*>(outputs.row_mean)[row + lane] = sum == T(0) ? T(0) : strip.row_mean[lane] / sum;
      }
    }
    const int64_t at = outputs.out.offset(strip.batch, strip.head, strip.first);
    void* residual = outputs.out_residual != nullptr ? element(outputs.out_residual, p.dtype, at) : nullptr;
    store_transposed<T>(element(outputs.out.data, p.dtype, at), p.dtype, outputs.out.stride[2], strip.count,
                        p.value_dim, strip.out_t, kLanes<P>, scale, residual);
  }
};

// Computes each element as if it were alone, those with few queries by decoding.
template <class P>
void forward_sequences(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  if constexpr (kDirect<P>) decode_sequences<P>(p, outputs, pool);
  const auto calls = element_calls(p, outputs, most_decoded(p) + 1, kAnyQueries);
  int64_t strips = 0;
  for (const auto& call : calls) strips += ForwardTask<P>::strips(call.params);
  const auto joint = joint_task<ForwardTask<P>>(calls, strips, pool.threads);
  for_each_item(pool, joint.items(), joint, Items::kIndependent);
}

template <class P>
void forward_pass(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  if (p.sequences.any()) return forward_sequences<P>(p, outputs, pool);
  if constexpr (kDirect<P>) {
    if (p.queries <= most_decoded(p)) return decode<P>(p, outputs, pool);
  }
  const ForwardTask<P> task(p, outputs, ForwardTask<P>::strips(p), pool.threads);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
