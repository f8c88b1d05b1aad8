// The gradient of a float mask: dS summed over the dimensions along which the mask was broadcast. A pass of
// its own that computes dS again: tasks own pieces of the result and gather everything that falls on them, so
// there are neither races nor a full-size temporary, and the order of each sum is fixed.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kMaskGradientKeys = 4 * kKeyBlock;  // keys of one task; amortises the packing of its strips

template <class T>
struct MaskGradientTask {
  const AttentionParams& p;
  const BackwardArguments& a;
  int64_t batches, heads, strips,
      ranges;  // pieces of the result along each dimension; 1 where it is summed over

  MaskGradientTask(const AttentionParams& params, const BackwardArguments& arguments)
      : p(params),
        a(arguments),
        batches(kept(0) ? p.batch : 1),
        heads(kept(1) ? p.heads : 1),
        strips(kept(2) ? (p.queries + kLanes<T> - 1) / kLanes<T> : 1),
        ranges(kept(3) ? (p.keys + kMaskGradientKeys - 1) / kMaskGradientKeys : 1) {}
  bool kept(int dimension) const { return a.grad_mask.stride[dimension] != 0; }
  int64_t items() const { return batches * heads * strips * ranges; }

  struct Scratch {
    Arena arena;
    GradientScratch<T> block;
    GradientStrip<T> strip;
    T *sum, *key_buffer, *value_buffer, *ones;  // sum: [kMaskGradientKeys][kLanes], or its first row

    static int64_t bytes(const AttentionParams& p) {
      return GradientScratch<T>::bytes() + GradientStrip<T>::bytes(p) +
             Arena::bytes_for<T>(kMaskGradientKeys * kLanes<T>) + Arena::bytes_for<T>(kLanes<T>) +
             Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.head_dim)) +
             Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.value_dim));
    }
    explicit Scratch(const MaskGradientTask& task) : arena(bytes(task.p)), block(arena) {
      strip.allocate(task.p, arena);
      sum = arena.take<T>(kMaskGradientKeys * kLanes<T>);
      key_buffer = arena.take<T>(kKeyBlock * round_up_to_vector<T>(task.p.head_dim));
      value_buffer = arena.take<T>(kKeyBlock * round_up_to_vector<T>(task.p.value_dim));
      ones = arena.take<T>(kLanes<T>);
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) ones[lane] = T(1);
    }
  };

  // Indices first, first + 1, ... end - 1 of a dimension that fall on one piece of the result.
  struct Span {
    int64_t first, end;
  };
  static Span span(bool is_kept, int64_t piece, int64_t piece_size, int64_t size) {
    if (!is_kept) return {0, size};
    const int64_t end = (piece + 1) * piece_size;
    return {piece * piece_size, end < size ? end : size};
  }

  void operator()(int64_t item, Scratch& s) const {
    const Span keys = span(kept(3), item % ranges, kMaskGradientKeys, p.keys);
    item /= ranges;
    const Span queries = span(kept(2), item % strips, kLanes<T>, p.queries);
    item /= strips;
    const Span head_span = span(kept(1), item % heads, 1, p.heads);
    const Span batch_span = span(kept(0), item / heads, 1, p.batch);
    memset(s.sum, 0, static_cast<size_t>(kMaskGradientKeys * kLanes<T>) * sizeof(T));
    for (int64_t batch = batch_span.first; batch < batch_span.end; ++batch) {
      for (int64_t head = head_span.first; head < head_span.end; ++head) {
        for (int64_t first = queries.first; first < queries.end; first += kLanes<T>) {
          const int64_t count = queries.end - first < kLanes<T> ? queries.end - first : kLanes<T>;
          add_strip(s, batch, head, first, count, keys);
        }
      }
    }
    store(s, batch_span.first, head_span.first, queries, keys);
  }

  void add_strip(Scratch& s, int64_t batch, int64_t head, int64_t first, int64_t count, Span keys) const {
    using S = Simd<T>;
    s.strip.begin_gradient(p, a, batch, head, first, count);
    for (int64_t key = keys.first; key < keys.end; key += kKeyBlock) {
      const int64_t block = keys.end - key < kKeyBlock ? keys.end - key : kKeyBlock;
      if (key >= s.strip.keys.end || key + block <= s.strip.keys.begin) continue;
      const int64_t kv_head = p.kv_head(head);
      const Rows<T> k = rows_as<T>(p.key, batch, kv_head, key, block, p.head_dim, false, s.key_buffer);
      const Rows<T> v = rows_as<T>(p.value, batch, kv_head, key, block, p.value_dim, false, s.value_buffer);
      if (!grad_score_block<T>(p, a, s.strip, key, block, k, v, s.block, false)) continue;
      // Lanes past the last query may see keys that no query does; nothing of theirs belongs into a sum over
      // lanes.
      for (int64_t j = 0; j < block; ++j) {
        for (int64_t lane = count; lane < s.strip.vecs * S::kWidth; ++lane)
          s.block.grad[j * kLanes<T> + lane] = T(0);
      }
      for (int64_t j = 0; j < block; ++j) {
        T* sum = s.sum + (kept(3) ? (key - keys.first + j) * kLanes<T> : 0);
        for (int64_t lane = 0; lane < s.strip.vecs * S::kWidth; lane += S::kWidth) {
          S::store(sum + lane, S::add(S::load(sum + lane), S::load(s.block.grad + j * kLanes<T> + lane)));
        }
      }
    }
  }

  void store(Scratch& s, int64_t batch, int64_t head, Span queries, Span keys) const {
    const View& g = a.grad_mask;
    const int64_t rows = kept(3) ? keys.end - keys.first : 1;
    const int64_t key_at = kept(3) ? keys.first * g.stride[3] : 0;
    if (kept(2) && kept(3)) {
      void* to = element(g.data, g.dtype, g.offset(batch, head, queries.first) + key_at);
      store_transposed<T>(to, g.dtype, g.stride[2], queries.end - queries.first, rows, s.sum, kLanes<T>,
                          s.ones);
      return;
    }
    for (int64_t j = 0; j < rows; ++j) {
      const T* sum = s.sum + j * kLanes<T>;
      if (kept(2)) {
        for (int64_t query = queries.first; query < queries.end; ++query) {
          store_element<T>(g.data, g.dtype, g.offset(batch, head, query), sum[query - queries.first]);
        }
      } else {
        T total = 0;
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) total += sum[lane];
        store_element<T>(g.data, g.dtype, g.offset(batch, head, 0) + key_at + j * g.stride[3], total);
      }
    }
  }
};

template <class T>
void mask_gradient(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  const MaskGradientTask<T> task(p, a);
  for_each_item(pool, task.items(), task);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
