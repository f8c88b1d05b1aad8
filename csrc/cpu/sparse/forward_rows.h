// The forward of selected keys for few heads: see row_tile.h.
#pragma once

#include "../fused/decode_rows.h"
#include "../products/few_query_products.h"
#include "forward_tile.h"
#include "row_tile.h"
#include "selected_calls.h"

namespace selfattn::cpu::SELFATTN_ISA {

// An item is a range of queries of the heads that share lists and a kv head. As in SelectedForward, it goes
// through the keys in ascending order, so that they stay in a cache for all queries of the range.
template <class P>
class SelectedRows {
  using T = Scalar<P>;
  using Products = FewQueryProducts<P>;

 public:
  SelectedRows(const AttentionParams& params, const ForwardOutputs& results, int threads)
      : p(params),
        outputs(results),
        heads(heads_of_list(params)),
        groups(p.heads / larger(heads, 1)),
        stride(round_up(p.value_dim, 32)) {
    constexpr int64_t kMostQueries = 1024, kSums = 768 * 1024, kKeys = 1024 * 1024;
    const int64_t row_bytes = larger(heads * stride * static_cast<int64_t>(sizeof(T)), 1),
                  key_bytes = larger((p.head_dim + p.value_dim) * size_of(p.dtype), 1);
    // Results do not depend on the size of units, but on how many keys all of its queries meet before the
    // next.
    unit_queries = limited(
        smaller(smaller(kMostQueries, kSums / row_bytes), p.batch * groups * p.queries / (2 * threads)), 1,
        larger(p.queries, 1));
    at_once = larger(kKeys / key_bytes, 4 * kKeyBlock);
  }
  int64_t items() const { return ranges() * p.batch * groups; }

  struct Parts {
    typename Products::Query* query;       // of the heads
    const char** rows;                     // [2 kMost] where those of a tile's keys and values begin
    T *scores, *bias, *visible, *factors;  // [heads][kMost]
    T *rescale, *used;                     // [heads]
    T* sums;                               // [heads][stride] of a tile
    SelectedList* lists;                   // [queries] of the unit
    RowSoftmax<T>* softmax;                // [queries][heads]
    T* out;                                // [queries][heads][stride]

    SELFATTN_OUT_OF_LINE void allocate(const SelectedRows& task, Arena& arena) {
      const AttentionParams& p = task.p;
      const int64_t block = task.heads * TileKeys::kMost, sums_rows = task.unit_queries * task.heads;
      query = arena.take<typename Products::Query>(Products::queries_size(p, task.heads));
      rows = arena.take<const char*>(2 * TileKeys::kMost);
      for (T** of_tile : {&scores, &bias, &visible, &factors}) *of_tile = arena.take<T>(block);
      for (T** of_heads : {&rescale, &used}) *of_heads = arena.take<T>(task.heads);
      sums = arena.take<T>(Products::sums_rows(task.heads) * task.stride);
      lists = arena.take<SelectedList>(task.unit_queries);
      softmax = arena.take<RowSoftmax<T>>(sums_rows);
      out = arena.take<T>(sums_rows * task.stride);
    }
  };
  using Scratch = WorkerScratch<Parts, typename Products::Session>;

  void operator()(int64_t item, Scratch& s) const {
    s.lay_out(*this);
    // Later queries see more keys under a causal mask, so the longest units go first.
    const int64_t group = item % groups, batch = item / groups % p.batch,
                  range = ranges() - 1 - item / groups / p.batch;
    const Unit unit{batch, group * heads, range * unit_queries,
                    smaller((range + 1) * unit_queries, p.queries)};
    const int64_t rows = (unit.end - unit.first) * heads;
    run(s, unit, false);
    // 0 * Inf or 0 * NaN of a hidden key shows as NaN in the sums.
    if (!all_finite(s.out, stride, rows, p.value_dim)) run(s, unit, true);
    for (int64_t row = 0; row < rows; ++row) {
      const T sum = s.softmax[row].sum;
      store_selected(p, outputs, batch, unit.head + row % heads, unit.first + row / heads, s.softmax[row].max,
                     sum, sum == T(0) ? T(0) : T(1) / sum, s.out + row * stride);
    }
  }

 private:
  const AttentionParams& p;
  const ForwardOutputs& outputs;
  int64_t heads, groups;  // of a list, and how many such groups there are
  int64_t stride;         // of rows of sums, in whole vectors, also those of pairs
  int64_t unit_queries, at_once;

  struct Unit {
    int64_t batch, head, first, end;
  };

  int64_t ranges() const { return divide_up(p.queries, unit_queries); }

  void run(Scratch& s, const Unit& unit, bool leave_hidden_out) const {
    const int64_t rows = (unit.end - unit.first) * heads;
    for (int64_t row = 0; row < rows; ++row) {
      s.softmax[row] = RowSoftmax<T>::of_sink(
          p.sinks.data != nullptr ? head_scalar<T>(p.sinks, unit.batch, unit.head + row % heads)
                                  : -std::numeric_limits<T>::infinity());
    }
    memset(s.out, 0, static_cast<size_t>(rows * stride) * sizeof(T));
    for (int64_t query = unit.first; query < unit.end; ++query) {
      s.lists[query - unit.first] = list_of(p, unit.batch, unit.head, query);
    }
    const KeyRange all = visible_keys(p, unit.first, unit.end - 1);
    for (int64_t first = all.begin / at_once * at_once; first < all.end; first += at_once) {
      for (int64_t query = unit.first; query < unit.end; ++query) {
        const KeyRange visible = visible_keys(p, query, query);
        const KeyRange keys{larger(first, visible.begin), smaller(first + at_once, visible.end)};
        bool loaded = false;
        for_each_tile(p, s.lists[query - unit.first], keys, TileKeys::kMost, [&](const TileKeys& tile) {
          if (!loaded) Products::load_queries(p, {unit.batch, unit.head, heads, query, 1}, s.query);
          loaded = true;
          meet(s, unit, query, tile, leave_hidden_out);
        });
      }
    }
  }

  // The heads of a query meet a tile.
  void meet(Scratch& s, const Unit& unit, int64_t query, const TileKeys& keys, bool leave_hidden_out) const {
    constexpr int64_t ld = TileKeys::kMost;
    const bool biased = !sees_whole_tile(p, query, keys);
    bool shown = !biased;
    for (int64_t h = 0; biased && h < heads; ++h) {
      shown |= load_row_bias(p, unit.batch, unit.head + h, query, keys, s.bias + h * ld, 1);
    }
    if (!shown) return;
    const int64_t kv_head = p.kv_head(unit.head);
    const char** const values = s.rows + keys.count;
    list_rows(p, p.key, unit.batch, kv_head, keys, s.rows);
    list_rows(p, p.value, unit.batch, kv_head, keys, values);
    const ListedRows key_rows(p.dtype, s.rows, keys.count, 2 * keys.count),
        value_rows(p.dtype, values, keys.count, keys.count);
    Products::template scores<true>(p, s.query, heads, key_rows.rows(), s.scores, ld);
    const int64_t first_row = (query - unit.first) * heads;
    for (int64_t h = 0; h < heads; ++h) {
      T* const scores = s.scores + h * ld;
      finish_scores_of_row<T>(p, keys.count, biased ? s.bias + h * ld : nullptr, scores);
      if (leave_hidden_out) mark_visible_row<T>(keys.count, scores, s.visible + h * ld);
      softmax_row<T, Statistics::kNone>(keys.count, scores, s.softmax + first_row + h, s.rescale + h);
      if (p.dropout.enabled) {
        T* const factors = s.factors + h * ld;
        row_dropout(p.dropout, unit.batch, unit.head + h, query, keys, keep_scale<T>(p.dropout), factors, 1);
        for (int64_t j = 0; j < keys.count; ++j) scores[j] *= factors[j];
      }
      s.used[h] = Products::round_weights(keys.count, scores);
    }
    add_values(s, value_rows.rows(), s.out + first_row * stride, leave_hidden_out);
  }

  // Adds the tile's weighted values to the sums of a query's heads, which follow the row's maximum.
  void add_values(Scratch& s, const FewQueryRows& values, T* out, bool leave_hidden_out) const {
    using S = Simd<T>;
    memset(s.sums, 0, static_cast<size_t>(Products::sums_rows(heads) * stride) * sizeof(T));
    const auto a = Products::weigh(s.scores, leave_hidden_out ? s.visible : nullptr, TileKeys::kMost,
                                   p.value_dim, s.sums, stride);
    Products::template values<true>(a, heads, values);
    for (int64_t h = 0; h < heads; ++h) {
      const auto rescale = S::set(s.rescale[h]), factor = S::set(s.used[h]);
      for (int64_t e = 0; e < round_up_to_vector<T>(p.value_dim); e += S::kWidth) {
        T* const to = out + h * stride + e;
        const auto sum = S::mul(Products::load_sums(s.sums + h * stride, e), factor);
        S::store(to, S::fma(S::load(to), rescale, sum));
      }
    }
  }
};

// Computes those of the calls that go by rows.
template <class P>
void selected_forward_by_rows(const std::vector<SelectedCall<ForwardOutputs>>& calls,
                              const ThreadPool& pool) {
  std::vector<SelectedRows<P>> tasks;
  for (const auto& call : calls) {
    if (goes_by_rows(call.params)) tasks.emplace_back(call.params, call.results, pool.threads);
  }
  const JointTask joint(std::move(tasks));
  for_each_item(pool, joint.items(), joint, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
