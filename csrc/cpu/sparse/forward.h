// The forward of selected keys. If many queries of a head share a block of keys, tiles are made of the block
// and those queries; otherwise of a query's heads and the keys that it sees.
#pragma once

#include "forward_rows.h"
#include "forward_tile.h"
#include "selected_calls.h"

namespace selfattn::cpu::SELFATTN_ISA {

// An item is a unit: a range of queries, of one head or of heads that share lists and a kv head. It goes
// through the keys in ascending order, so that they stay in a cache for all queries of the range, and keeps
// the sums of its queries beside them.
template <class P>
class SelectedForward {
  using T = Scalar<P>;

 public:
  SelectedForward(const AttentionParams& params, const ForwardOutputs& results, int threads)
      : p(params), outputs(results), by_blocks(goes_by_blocks(params)) {
    // Results do not depend on the size of units. Blocks should have some whole strips of a unit's queries.
    constexpr int64_t kStrips = 4, kCache = 768 * 1024, kMostHeads = kMostStrips<P> * kLanes<P>;
    const Selection& s = p.selection;
    shared_heads = by_blocks ? 1 : smaller(p.heads / p.kv_heads, s.heads_per_list);
    const int64_t groups = p.batch * (p.heads / shared_heads);
    // Units share the heads if there are few of them, although each then gathers the keys.
    unit_heads = smaller(shared_heads, groups * p.queries < 2 * threads ? kLanes<P> : kMostHeads);
    const int64_t row_bytes = larger(round_up_to_vector<T>(p.value_dim), 1) * unit_heads * sizeof(T),
                  shared = kStrips * kLanes<P> * blocks_of(p) / larger(s.longest, 1),
                  wanted = by_blocks ? larger(shared, kLanes<P>) : 1024,
                  for_threads = larger(groups * p.queries / (2 * threads), by_blocks ? kLanes<P> : 1);
    unit_queries =
        limited(smaller(smaller(wanted, kCache / row_bytes), for_threads), 1, larger(p.queries, 1));
    if (by_blocks) unit_queries = round_up(unit_queries, s.query_size);
  }
  int64_t items() const { return ranges() * p.batch * (p.heads / shared_heads) * parts(); }

  // A strip whose queries are gathered, with the place of each lane among the rows of the unit.
  struct OpenStrip {
    ForwardStrip<P> strip;
    TileRows<P> rows;
    int64_t at[kLanes<P>];
    T* before;  // [kLanes] row_max when it was opened
  };
  struct Parts {
    SelectedScratch<P> tile;
    OpenStrip open[kMostStrips<P>];
    RowSums<T> out;  // of the unit, [query][head], with their softmax
    T *row_max, *row_sum, *used_sum;
    T* factor;  // [kLanes]
    InverseLists lists;

    SELFATTN_OUT_OF_LINE void allocate(const SelectedForward& task, Arena& arena) {
      const int64_t rows = smaller(task.unit_queries, task.p.queries) * task.unit_heads;
      tile.allocate(task.p, arena);
      for (int64_t i = 0; i < divide_up(task.unit_heads, kLanes<P>); ++i) {
        open[i].strip.allocate(task.p, arena);
        open[i].before = arena.take<T>(kLanes<P>);
      }
      out.stride = round_up_to_vector<T>(task.p.value_dim);
      out.data = arena.take<T>(rows * out.stride);
      row_max = arena.take<T>(rows);
      row_sum = arena.take<T>(rows);
      used_sum = arena.take<T>(rows);
      factor = arena.take<T>(kLanes<P>);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    s.lay_out(*this);
    // Later queries see more keys under a causal mask, so the longest units go first.
    const int64_t groups = p.heads / shared_heads, part = item % parts(), group = item / parts() % groups,
                  batch = item / parts() / groups % p.batch,
                  range = ranges() - 1 - item / parts() / groups / p.batch,
                  head = group * shared_heads + part * unit_heads;
    const Unit unit{batch, range * unit_queries, smaller((range + 1) * unit_queries, p.queries), head,
                    smaller(head + unit_heads, (group + 1) * shared_heads)};
    run(s, unit, false);
    if constexpr (kDirect<P>) {
      // 0 * Inf or 0 * NaN of a hidden key shows as NaN in the sums. Pairs have seen such values before.
      const int64_t rows = (unit.end - unit.first) * (unit.end_head - unit.head);
      if (!all_finite(s.out.data, s.out.stride, rows, p.value_dim)) run(s, unit, true);
    }
    for (int64_t query = unit.first; query < unit.end; ++query) {
      for (int64_t h = unit.head; h < unit.end_head; ++h) finish(s, unit, h, query);
    }
  }

 private:
  const AttentionParams& p;
  const ForwardOutputs& outputs;
  bool by_blocks;
  int64_t shared_heads, unit_heads, unit_queries;

  struct Unit {
    int64_t batch, first, end, head, end_head;
    int64_t row(int64_t h, int64_t query) const { return (query - first) * (end_head - head) + h - head; }
  };

  int64_t parts() const { return divide_up(shared_heads, unit_heads); }
  int64_t ranges() const { return divide_up(p.queries, unit_queries); }

  void run(Scratch& s, const Unit& unit, bool leave_hidden_out) const {
    s.tile.leave_hidden_out = leave_hidden_out;
    reset(s, unit);
    by_blocks ? meet_blocks(s, unit) : meet_queries(s, unit);
  }

  void reset(Scratch& s, const Unit& unit) const {
    const T nothing = -std::numeric_limits<T>::infinity();
    for (int64_t h = unit.head; h < unit.end_head; ++h) {
      const T sink = p.sinks.data != nullptr ? head_scalar<T>(p.sinks, unit.batch, h) : nothing;
      for (int64_t query = unit.first; query < unit.end; ++query) {
        const int64_t row = unit.row(h, query);
        s.row_max[row] = sink;
        s.row_sum[row] = s.used_sum[row] = sink == nothing ? T(0) : T(1);
      }
    }
    const int64_t rows = (unit.end - unit.first) * (unit.end_head - unit.head);
    memset(s.out.data, 0, static_cast<size_t>(rows * s.out.stride) * sizeof(T));
  }

  static void add_row(OpenStrip& open, const Unit& unit, int64_t head, int64_t query) {
    open.at[open.rows.count] = unit.row(head, query);
    open.rows.add(head, query);
  }
  // Goes on with the softmax of the strip's rows, and with outputs of 0.
  void begin(Scratch& s, OpenStrip& open) const {
    ForwardStrip<P>& strip = open.strip;
    strip.begin(p, gathered<P>(p, open.rows, p.query, p.head_dim, s.tile.query_rows), !by_blocks);
    strip.batch = open.rows.batch;
    strip.head = open.rows.head[0];
    strip.reset(p);
    for (int64_t lane = 0; lane < open.rows.count; ++lane) {
      strip.row_max[lane] = s.row_max[open.at[lane]];
      strip.row_sum[lane] = s.row_sum[open.at[lane]];
      strip.used_sum[lane] = s.used_sum[open.at[lane]];
    }
    memcpy(open.before, strip.row_max, static_cast<size_t>(strip.vecs) * Simd<T>::kWidth * sizeof(T));
  }
  // Adds the strip's outputs to the sums, which follow the row's maximum.
  void end(Scratch& s, const OpenStrip& open) const {
    using S = Simd<T>;
    const ForwardStrip<P>& strip = open.strip;
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const auto nothing = S::set(-std::numeric_limits<T>::infinity());
      const auto before = S::load(open.before + lane);
      const auto change = exp_nonpositive<T>(S::sub(before, S::load(strip.row_max + lane)));
      // Sums of rows that had seen nothing are 0.
      S::store(s.factor + lane, S::select(S::equal(before, nothing), S::set(T(0)), change));
    }
    add_transposed<P>(s.out, open.at, open.rows.count, p.value_dim, strip.out_t, s.factor);
    for (int64_t lane = 0; lane < open.rows.count; ++lane) {
      s.row_max[open.at[lane]] = strip.row_max[lane];
      s.row_sum[open.at[lane]] = strip.row_sum[lane];
      s.used_sum[open.at[lane]] = strip.used_sum[lane];
    }
  }

  void meet_blocks(Scratch& s, const Unit& unit) const {
    const Selection& selection = p.selection;
    const int64_t size = selection.key_size, at_once = loaded_keys<P>(p);
    s.lists.build(selection, unit.batch, unit.head, unit.first / selection.query_size,
                  divide_up(unit.end, selection.query_size), blocks_of(p));
    for (int64_t block = 0; block < blocks_of(p); ++block) {
      if (s.lists.begin_of(block) == s.lists.end_of(block)) continue;
      const int64_t end = smaller((block + 1) * size, p.keys);
      for (int64_t key = block * size; key < end; key += at_once) {
        meet_keys(s, unit, block, {key, smaller(key + at_once, end)});
      }
    }
  }

  // The queries of a unit that selected a block meet some of its keys.
  void meet_keys(Scratch& s, const Unit& unit, int64_t block, KeyRange keys) const {
    const int64_t count = keys.end - keys.begin, size = p.selection.query_size,
                  kv_head = p.kv_head(unit.head);
    OpenStrip& open = s.open[0];
    bool loaded = false;
    const auto meet = [&] {
      if (open.rows.count == 0) return;
      if (!loaded) {
        s.tile.keys.load(
            key_source(p, p.key, unit.batch, kv_head, keys.begin, count, p.head_dim, s.tile.paged_keys));
        s.tile.values.load(
            key_source(p, p.value, unit.batch, kv_head, keys.begin, count, p.value_dim, s.tile.paged_values));
        loaded = true;
      }
      begin(s, open);
      for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) {
        const TileKeys tile = TileKeys::neighbours(key, smaller(keys.end - key, kKeyBlock));
        forward_tile<P>(p, open.strip, open.rows, tile, key - keys.begin, s.tile);
      }
      end(s, open);
      open.rows.count = 0;
    };
    open.rows.begin(unit.batch, kv_head);
    for (const int32_t* row = s.lists.begin_of(block); row != s.lists.end_of(block); ++row) {
      const int64_t end_query = smaller((*row + int64_t{1}) * size, unit.end);
      for (int64_t query = *row * size; query < end_query; ++query) {
        const KeyRange visible = visible_keys(p, query, query);
        if (visible.begin >= keys.end || visible.end <= keys.begin) continue;
        add_row(open, unit, unit.head, query);
        if (open.rows.count == kLanes<P>) meet();
      }
    }
    meet();
  }

  void ask_for_keys(const Unit& unit, int64_t first, int64_t count) const {
    const int64_t rows = smaller(count, p.keys - first), kv_head = p.kv_head(unit.head);
    // Few queries select few of them.
    if (rows <= 0 || count > 64 || p.pages.table != nullptr) return;
    ask_for_rows(row_source(p.key, p.dtype, unit.batch, kv_head, first, rows, p.head_dim), 0, rows);
    ask_for_rows(row_source(p.value, p.dtype, unit.batch, kv_head, first, rows, p.value_dim), 0, rows);
  }

  // Returns the keys that all queries of a unit meet before the next ones: so many as a cache holds.
  int64_t keys_at_once() const {
    constexpr int64_t kCache = 512 * 1024;
    return larger(kCache / larger((p.head_dim + p.value_dim) * size_of(p.dtype), 1), 4 * kKeyBlock);
  }
  void meet_queries(Scratch& s, const Unit& unit) const {
    const int64_t at_once = keys_at_once(), share = divide_up(at_once, unit.end - unit.first);
    const KeyRange all = visible_keys(p, unit.first, unit.end - 1);
    for (int64_t first = all.begin / at_once * at_once; first < all.end; first += at_once) {
      for (int64_t query = unit.first; query < unit.end; ++query) {
        // Each query asks for a share of the keys that come next.
        ask_for_keys(unit, first + at_once + (query - unit.first) * share, share);
        const KeyRange visible = visible_keys(p, query, query);
        meet_query(s, unit, query, {larger(first, visible.begin), smaller(first + at_once, visible.end)});
      }
    }
  }

  // The heads of a query meet the keys of a range that it selected.
  void meet_query(Scratch& s, const Unit& unit, int64_t query, KeyRange keys) const {
    const int64_t kv_head = p.kv_head(unit.head);
    int64_t strips = 0;
    SelectedList list = list_of(p, unit.batch, unit.head, query);
    for_each_tile(p, list, keys, kKeyBlock, [&](const TileKeys& tile) {
      for (int64_t head = unit.head + strips * kLanes<P>; head < unit.end_head; head += kLanes<P>) {
        OpenStrip& open = s.open[strips++];
        open.rows.begin(unit.batch, kv_head);
        for (int64_t h = head; h < smaller(head + kLanes<P>, unit.end_head); ++h) {
          add_row(open, unit, h, query);
        }
        begin(s, open);
      }
      s.tile.load(p, unit.batch, kv_head, tile);
      for (int64_t i = 0; i < strips; ++i) {
        forward_tile<P>(p, s.open[i].strip, s.open[i].rows, tile, 0, s.tile);
      }
    });
    for (int64_t i = 0; i < strips; ++i) end(s, s.open[i]);
  }

  void finish(const Scratch& s, const Unit& unit, int64_t head, int64_t query) const {
    const int64_t row = unit.row(head, query);
    const bool rounded = s.open[0].strip.query.rounds();
    const T sum = s.row_sum[row] == s.row_sum[row] && rounded ? s.used_sum[row] : s.row_sum[row];
    const T one = rounded && p.dropout.enabled ? keep_scale<T>(p.dropout) : T(1);
    store_selected(p, outputs, unit.batch, head, query, s.row_max[row], s.row_sum[row],
                   sum == T(0) ? T(0) : one / sum, s.out.data + row * s.out.stride);
  }
};

template <class P>
void selected_forward(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  const auto calls = selected_calls(p, outputs);
  std::vector<SelectedForward<P>> tasks;
  for (const auto& call : calls) {
    if (kDirect<P> && goes_by_rows(call.params)) continue;
    tasks.emplace_back(call.params, call.results, pool.threads);
  }
  const JointTask joint(std::move(tasks));
  for_each_item(pool, joint.items(), joint, Items::kIndependent);
  if constexpr (kDirect<P>) selected_forward_by_rows<P>(calls, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
