// The gradient of a float mask in a separate pass, if its type is not that of the sums or the queries are
// few. It is dS summed over the dimensions along which the mask was broadcast, and rounded once. The pass
// computes dS again: tasks own parts of the result and gather everything that falls on them, so there are
// neither races nor a full-size temporary, and the order of each sum is fixed. Other masks get their
// gradients in the backward: mask_sum.h.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kMaskGradientKeys = 4 * kKeyBlock;  // keys of a task, to amortise loading its strips

// Computes dS of a strip and a block of keys. Other gradients of scores have the same members.
template <class P>
struct ScoreGradient {
  using Arguments = BackwardArguments;
  static const View& grad_mask(const Arguments& a) { return a.grad_mask; }

  GradientStrip<P> strip;
  GradientScratch<P> block;
  RowOperand<P> keys, values;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    block.allocate(p, arena);
    strip.allocate(p, arena);
    keys.allocate(p, kKeyBlock, p.head_dim, arena);
    values.allocate(p, kKeyBlock, p.value_dim, arena);
  }
  void begin(const AttentionParams& p, const Arguments& a, int64_t batch, int64_t head, int64_t first,
             int64_t count) {
    strip.begin_gradient(p, a, batch, head, first, count);
  }
  // [count][kLanes]; nullptr if all of it is hidden.
  Scalar<P>* of_block(const AttentionParams& p, const Arguments& a, int64_t key, int64_t count) {
    const int64_t kv_head = p.kv_head(strip.head);
    keys.load(row_source(p.key, p.dtype, strip.batch, kv_head, key, count, p.head_dim));
    values.load(row_source(p.value, p.dtype, strip.batch, kv_head, key, count, p.value_dim));
    const GradientBlock<P> keys_at_hand{key, count, 0, &keys, &values};
    return grad_score_block<P>(p, a, strip, keys_at_hand, block, false) ? block.grad.block : nullptr;
  }
};

template <class P, class Source>
struct MaskGradientTask {
  using T = Scalar<P>;
  using Arguments = typename Source::Arguments;
  using Calls = std::vector<ElementCall<Arguments>>;

  const AttentionParams& p;
  const Arguments& a;
  const Calls* elements;  // nullable; the calls of batch elements that share their mask, instead of the batch
  int64_t batches, heads, strips,
      ranges;  // parts of the result along each dimension; 1 where it is summed over

  MaskGradientTask(const AttentionParams& params, const Arguments& arguments, const Calls* calls = nullptr)
      : p(params),
        a(arguments),
        elements(calls),
        batches(kept(0) ? p.batch : 1),
        heads(kept(1) ? p.heads : 1),
        strips(kept(2) ? divide_up(p.queries, kLanes<P>) : 1),
        ranges(kept(3) ? divide_up(p.keys, kMaskGradientKeys) : 1) {}
  bool kept(int dimension) const { return Source::grad_mask(a).stride[dimension] != 0; }
  int64_t items() const { return batches * heads * strips * ranges; }

  struct Parts {
    Source source;
    T *sum, *ones;  // sum: [kMaskGradientKeys][kLanes], or its first row

    SELFATTN_OUT_OF_LINE void allocate(const MaskGradientTask& task, Arena& arena) {
      source.allocate(task.p, arena);
      sum = arena.take<T>(kMaskGradientKeys * kLanes<P>);
      ones = arena.take_filled<T>(kLanes<P>, T(1));
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  // Indices first .. end - 1 of a dimension, which fall on one part of the result.
  struct Span {
    int64_t first, end;
  };
  static Span span(bool is_kept, int64_t part, int64_t part_size, int64_t size) {
    if (!is_kept) return {0, size};
    const int64_t end = (part + 1) * part_size;
    return {part * part_size, smaller(end, size)};
  }

  void operator()(int64_t item, Scratch& s) const {
    const Span keys = span(kept(3), item % ranges, kMaskGradientKeys, p.keys);
    item /= ranges;
    const Span queries = span(kept(2), item % strips, kLanes<P>, p.queries);
    item /= strips;
    const Span head_span = span(kept(1), item % heads, 1, p.heads);
    const Span batch_span = span(kept(0), item / heads, 1, p.batch);
    memset(s.sum, 0, static_cast<size_t>(kMaskGradientKeys * kLanes<P>) * sizeof(T));
    if (elements != nullptr) {
      for (const auto& element : *elements) {
        add_batch(s, element.params, element.results, 0, head_span, queries, keys);
      }
    } else {
      for (int64_t batch = batch_span.first; batch < batch_span.end; ++batch) {
        add_batch(s, p, a, batch, head_span, queries, keys);
      }
    }
    store(s, batch_span.first, head_span.first, queries, keys);
  }

  // Adds the contribution of one element of the batch, which may be shorter than others.
  static void add_batch(Scratch& s, const AttentionParams& p, const Arguments& a, int64_t batch, Span heads,
                        Span queries, Span keys) {
    queries.end = smaller(queries.end, p.queries);
    keys.end = smaller(keys.end, p.keys);
    for (int64_t head = heads.first; head < heads.end; ++head) {
      for (int64_t first = queries.first; first < queries.end; first += kLanes<P>) {
        const int64_t count = smaller(queries.end - first, kLanes<P>);
        add_strip(s, p, a, batch, head, first, count, keys);
      }
    }
  }

  SELFATTN_OUT_OF_LINE static void add_strip(Scratch& s, const AttentionParams& p, const Arguments& a,
                                             int64_t batch, int64_t head, int64_t first, int64_t count,
                                             Span keys) {
    using S = Simd<T>;
    const bool every_key = Source::grad_mask(a).stride[3] != 0;
    s.source.begin(p, a, batch, head, first, count);
    const QueryStrip<P>& strip = s.source.strip;
    for (int64_t key = keys.first; key < keys.end; key += kKeyBlock) {
      const int64_t block = smaller(keys.end - key, kKeyBlock);
      if (key >= strip.keys.end || key + block <= strip.keys.begin) continue;
      T* grads = s.source.of_block(p, a, key, block);
      if (grads == nullptr) continue;
      clear_past_last<P>(strip, block, grads);
      for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
        if (!every_key) {
          const auto sum = sum_over_keys<T>(grads + lane, block, kLanes<P>);
          S::store(s.sum + lane, S::add(S::load(s.sum + lane), sum));
          continue;
        }
        T* sum = s.sum + (key - keys.first) * kLanes<P> + lane;
        for (int64_t j = 0; j < block; ++j, sum += kLanes<P>) {
          S::store(sum, S::add(S::load(sum), S::load(grads + j * kLanes<P> + lane)));
        }
      }
    }
  }

  void store(Scratch& s, int64_t batch, int64_t head, Span queries, Span keys) const {
    const View& g = Source::grad_mask(a);
    const int64_t rows = kept(3) ? keys.end - keys.first : 1;
    const int64_t key_at = kept(3) ? keys.first * g.stride[3] : 0;
    const auto at = [&](int64_t query, int64_t j) {
      return g.offset(batch, head, query) + key_at + j * g.stride[3];
    };
    // Another kernel has computed the elements with more queries, and stored their sum. A gradient of the
    // sums' own type is zeros on entry, and the passes that gather it (mask_sum.h) add to it.
    constexpr bool kZeros = std::is_same<Arguments, BackwardArguments>::value;
    const bool adds = (elements != nullptr && p.sequences.most_queries != kAnyQueries) ||
                      (kZeros && g.dtype == dtype_of<T>());
    for (int64_t j = 0; adds && j < rows; ++j) {
      for (int64_t query = queries.first; query < (kept(2) ? queries.end : 1); ++query) {
        s.sum[j * kLanes<P> + query - queries.first] += load_element<T>(g.data, g.dtype, at(query, j));
      }
    }
    if (kept(2) && kept(3)) {
      void* to = element(g.data, g.dtype, at(queries.first, 0));
      store_transposed<T>(to, g.dtype, g.stride[2], queries.end - queries.first, rows, s.sum, kLanes<P>,
                          s.ones);
      return;
    }
    for (int64_t j = 0; j < rows; ++j) {
      const T* sum = s.sum + j * kLanes<P>;
      if (kept(2)) {
        for (int64_t query = queries.first; query < queries.end; ++query) {
          store_element<T>(g.data, g.dtype, at(query, 0), sum[query - queries.first]);
        }
      } else {
        double total = 0;
        for (int64_t lane = 0; lane < kLanes<P>; ++lane) total += static_cast<double>(sum[lane]);
        store_element<T>(g.data, g.dtype, at(0, j), static_cast<T>(total));
      }
    }
  }
};

template <class P, class Source = ScoreGradient<P>>
void mask_gradient(const AttentionParams& p, const typename Source::Arguments& a, const ThreadPool& pool) {
  const MaskGradientTask<P, Source> task(p, a);
  for_each_item(pool, task.items(), task);
}

// Does the same for a batch whose elements have their own lengths; `calls` are those of its elements.
template <class P, class Source = ScoreGradient<P>>
void mask_gradient(const AttentionParams& p, const typename Source::Arguments& a,
                   const std::vector<ElementCall<typename Source::Arguments>>& calls,
                   const ThreadPool& pool) {
  using Task = MaskGradientTask<P, Source>;
  if (calls.empty()) return;
  if (Source::grad_mask(a).stride[0] == 0) {
    const Task task(p, a, &calls);
    return for_each_item(pool, task.items(), task);
  }
  const auto joint = joint_task<Task>(calls);
  for_each_item(pool, joint.items(), joint);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
