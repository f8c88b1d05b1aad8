// The backward pass: gradients of queries, keys, values, slopes and sinks. A task owns a chunk of the keys of
// one (batch, kv head): it sums dK and dV of the chunk over all queries of all heads of the group in scratch,
// and rounds them once. dQ gathers contributions of all chunks, in the order of the chunks: the task of chunk
// c adds to a strip after that of chunk c - 1. So there are no atomics on data and no partial copies of dQ,
// and the order of every sum depends on nothing but the shape. Each chunk follows the one before through the
// strips, one strip behind, so they hardly ever wait.
#pragma once

#include "backward_scratch.h"
#include "few_query_backward.h"
#include "mask_gradient.h"

namespace selfattn::cpu::SELFATTN_ISA {

// dQ of 16-bit tensors is summed in float across chunks. The size is a whole number of cache lines.
template <class P>
size_t backward_workspace(const AttentionParams& p) {
  using T = Scalar<P>;
  if (p.sequences.any()) {
    size_t bytes = 0;
    for (const int64_t b : elements_by_work(p, 0, kAnyQueries)) {
      bytes += backward_workspace<P>(element_of(p, b));
    }
    return bytes;
  }
  if (p.dtype == dtype_of<T>() || chunk_count<P>(p) == 1) return 0;
  return static_cast<size_t>(Arena::bytes_for<T>(p.batch * p.heads * p.queries * p.head_dim));
}

template <class P>
class BackwardTask {
  using T = Scalar<P>;

 public:
  // `sharers`: see MaskSum.
  BackwardTask(const AttentionParams& params, const BackwardArguments& arguments,
               typename MaskSum<P>::Chain* sharers = nullptr)
      : p(params),
        a(arguments),
        chunk(chunk_keys<P>(params)),
        chunks(chunk_count<P>(params)),
        heads_kv(params.batch * params.kv_heads),
        takes_paired(options_of(params).within(kPairedOptions) && arguments.grad_weights.data == nullptr &&
                     arguments.grad_slopes_rows == nullptr && !has_gradients_of_statistics(arguments) &&
                     !MaskSum<P>::takes(arguments)),
        mask_sum(params, arguments, chunk, chunks, sharers),
        strips_done(new std::atomic<int64_t>[static_cast<size_t>(heads_kv * chunks)]) {
    for (int64_t i = 0; i < heads_kv * chunks; ++i) strips_done[i].store(0, std::memory_order_relaxed);
  }
  int64_t items() const { return heads_kv * chunks; }
  Items item_kind() const {
    return chunks == 1 && !MaskSum<P>::takes(a) ? Items::kIndependent : Items::kInOrder;
  }

  struct Parts : BackwardScratch<P> {
    SELFATTN_OUT_OF_LINE void allocate(const BackwardTask& t, Arena& arena) {
      BackwardScratch<P>::allocate(t.p, t.chunk_rows(), t.mask_sum, arena);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    const Item at(*this, item);
    const int64_t batch = at.batch, kv_head = at.kv_head, begin = at.begin, keys = at.keys;
    const RowSource key_source = row_source(p.key, p.dtype, batch, kv_head, begin, keys, p.head_dim);
    s.key_rows.load(key_source);
    s.key_columns.load_shared(key_source, s.key_rows);
    s.value_rows.load(row_source(p.value, p.dtype, batch, kv_head, begin, keys, p.value_dim));
    const bool finite =
        well_behaved(s.key_rows, keys, p.head_dim) && well_behaved(s.value_rows, keys, p.value_dim);
    memset(s.grad_key, 0, static_cast<size_t>(keys * s.head_stride) * sizeof(T));
    memset(s.grad_value, 0, static_cast<size_t>(keys * s.value_stride) * sizeof(T));

    mask_sum.begin_item(s.mask, at.chunk, batch, kv_head, begin, keys);

    // The loop over strips is outside that over heads: heads may share a mask, and then take turns at its
    // gradient.
    const int64_t group = p.heads / p.kv_heads;
    int64_t done = 0;
    for (int64_t first = 0; first < p.queries;) {
      Panel panel{};
      panel.first = first;
      for (; panel.strips < panel_strips() && first < p.queries; ++panel.strips) {
        const int64_t count = strip_queries<P>(first, p.queries);
        panel.counts[panel.strips] = count;
        panel.contributes[panel.strips] =
            some_head_sees(p, batch, kv_head, {first, first + count}, {begin, begin + keys});
        panel.contribute |= panel.contributes[panel.strips];
        first += count;
      }
      panel.count = first - panel.first;
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        begin_panel(s, at, panel, head);
        if (panel.contribute) add_panel(s, at, panel, head, done, !finite);
        for (int64_t i = 0, query = panel.first; i < panel.strips; query += panel.counts[i++]) {
          mask_sum.end_step(s.mask, head, query, panel.counts[i], done);
          publish(s, at, panel, i, head, query, done);
          strips_done[at.number].store(++done, std::memory_order_release);
        }
      }
    }
    mask_sum.end_item(s.mask);
    store_sums<T>(a.grad_key, p.dtype, batch, kv_head, begin, keys, p.head_dim, {s.grad_key, s.head_stride},
                  static_cast<T>(p.scale));
    store_sums<T>(a.grad_value, p.dtype, batch, kv_head, begin, keys, p.value_dim,
                  {s.grad_value, s.value_stride}, T(1));
  }

 private:
  const AttentionParams& p;
  const BackwardArguments& a;
  int64_t chunk, chunks, heads_kv;
  // Whether weights and dS may go to the products as pairs alone: the call needs them for nothing but the
  // gradients of query, key and value, and all of its options are in the scores.
  bool takes_paired;
  MaskSum<P> mask_sum;
  std::unique_ptr<std::atomic<int64_t>[]>
      strips_done;  // [chunks][heads_kv] strips whose dQ the chunk has added to

  // A chunk of the keys of one (batch, kv head). All heads' first chunks come before any second one: with
  // enough heads no item waits at all.
  struct Item {
    int64_t number, chunk, batch, kv_head;
    int64_t begin, keys;  // the chunk's first key, and how many it has

    Item(const BackwardTask& t, int64_t item)
        : number(item),
          chunk(item / t.heads_kv),
          batch(item % t.heads_kv / t.p.kv_heads),
          kv_head(item % t.heads_kv % t.p.kv_heads),
          begin(chunk * t.chunk),
          keys(smaller(t.p.keys - begin, t.chunk)) {}
    bool is_first() const { return chunk == 0; }
  };

  // Neighbouring strips of one head; all but the last of them are full.
  struct Panel {
    int64_t first, count, strips;
    int64_t counts[kPanelStrips<P>];
    bool contributes[kPanelStrips<P>];  // whether the strip sees keys of the chunk
    bool contribute;                    // whether any does
  };
  // Items take turns at the mask's gradient strip by strip. Several strips may add at once only if that
  // changes no bit, as when running sums stay in the products.
  int64_t panel_strips() const {
    if constexpr (kPanelStrips<P> > 1) {
      if (P::pieces(p) == 1 && !MaskSum<P>::takes(a)) return kPanelStrips<P>;
    }
    return 1;
  }

  int64_t chunk_rows() const { return p.keys < chunk ? round_up(p.keys, 16) : chunk; }

  // Direct products must look for data whose products with a weight of 0 are NaN; pairs have seen it already.
  template <class Operand>
  static bool well_behaved(const Operand& operand, int64_t rows, int64_t columns) {
    if constexpr (kDirect<P>) return all_finite(operand.rows.data, operand.rows.stride, rows, columns);
    return true;
  }

  // Returns the rows that the panel after this one begins with.
  ComingRows next_panel(const Item& item, const Panel& panel, int64_t head) const {
    const int64_t group = p.heads / p.kv_heads;
    const bool same_queries = (head + 1) % group != 0;
    const int64_t first = same_queries ? panel.first : panel.first + panel.count;
    const int64_t next_head = same_queries ? head + 1 : head + 1 - group;
    const int64_t rows = smaller(p.queries - first, Scratch::kPanelLanes);
    if (!kAsksForNextPanel<P> || rows == 0) return {};
    const auto rows_of = [&](const View& view, int64_t columns) {
      return row_source(view, p.dtype, item.batch, next_head, first, rows, columns);
    };
    return {rows_of(p.query, p.head_dim), rows_of(a.grad_out, p.value_dim), rows_of(a.out, p.value_dim), rows,
            divide_up(item.keys, kKeyBlock) * panel.strips};
  }

  void begin_panel(Scratch& s, const Item& item, const Panel& panel, int64_t head) const {
    for (int64_t i = 0, query = panel.first; i < panel.strips; query += panel.counts[i++]) {
      if (!panel.contributes[i] && !item.is_first()) continue;
      s.strips[i].begin_gradient(p, a, item.batch, head, query, panel.counts[i]);
      if (item.is_first()) sink_gradients(s.strips[i]);
      memset(s.slope_rows[i], 0, static_cast<size_t>(kLanes<P>) * sizeof(T));
      for (int64_t e = 0; e < p.head_dim; ++e) {
        memset(s.grad_query_t[i] + e * kLanes<P>, 0,
               static_cast<size_t>(s.strips[i].vecs) * Simd<T>::kWidth * sizeof(T));
      }
    }
  }

  // Computes a panel against the chunk: dQ^T of its strips in s.grad_query_t, dK and dV added to the chunk's.
  void add_panel(Scratch& s, const Item& item, const Panel& panel, int64_t head, int64_t step,
                 bool leave_hidden_out) const {
    const auto rows_of = [&](const View& view, int64_t columns) {
      return row_source(view, p.dtype, item.batch, head, panel.first, panel.count, columns);
    };
    if constexpr (kDirect<P>) {
      s.query_rows.load(rows_of(p.query, p.head_dim));
    } else {
      // Numbers of one piece are never in float; those of more pieces come in panels of one strip.
      s.block.grad.in_float = panel.strips == 1 ? s.strips[0].gradients_in_float() : nullptr;
      s.query_rows.load(rows_of(p.query, p.head_dim), s.block.grad.in_float);
    }
    s.grad_out_rows.load(rows_of(a.grad_out, p.value_dim).as_gradient());
    leave_hidden_out = leave_hidden_out || !well_behaved(s.query_rows, panel.count, p.head_dim) ||
                       !well_behaved(s.grad_out_rows, panel.count, p.value_dim);
    const bool alone = leave_hidden_out || s.query_rows.special() || s.grad_out_rows.special();
    const bool by_blocks = adds_blocks<P>(p) && panel.count > kLanes<P> / 2;
    PanelBlocks waiting;
    const auto add_waiting = [&] {
      if (waiting.count > 0) add_blocks<P>(p, operands_of(s, item), waiting, s.block);
      waiting.count = 0;
    };
    ComingRows next = next_panel(item, panel, head);
    for (int64_t from = 0; from < item.keys; from += kKeyBlock) {
      const int64_t rows = smaller(item.keys - from, kKeyBlock);
      int64_t run = 0, ready = 0;  // queries run .. ready - 1 of the panel wait to be added
      const auto add_run = [&] {
        if (ready > run) add_rows(s, run, ready - run, from, rows, nullptr);
        run = ready = 0;
      };
      for (int64_t i = 0, at = 0; i < panel.strips; at += panel.counts[i++]) {
        next.ask();
        const PairedPlace place{at, rows};
        int64_t count = panel.contributes[i] ? seen_rows(s.strips[i], item, from, rows) : 0;
        if (count > 0) {
          const bool mark = alone || s.key_columns.special(from, count);
          const bool paired = takes_paired && pairs_gradients(s) && s.strips[i].ordinary && !mark;
          if (by_blocks && paired && rows == kKeyBlock && !special_values(s, from, rows)) {
            add_run();
            if (!waiting.takes(from, i)) add_waiting();
            waiting.add(from, i);
            continue;
          }
          add_waiting();
          count = add_strip(s, item, i, from, count, place, step, mark, paired) ? count : 0;
        }
        if (count == 0) {
          add_run();
        } else if (alone || panel.strips == 1) {
          add_rows(s, at, panel.counts[i], from, count, alone ? s.block.visible : nullptr);
        } else {
          if (ready == run) run = at;
          ready = at + panel.counts[i];
        }
      }
      add_run();
    }
    add_waiting();
  }

  static GradientPanel<P> operands_of(Scratch& s, const Item& item) {
    return {s.strips,   &s.query_rows,  &s.grad_out_rows, &s.key_rows,  &s.value_rows, &s.key_columns,
            item.begin, s.grad_query_t, s.grad_key,       s.grad_value, s.head_stride, s.value_stride};
  }

  // Adds to dK and dV of a block of keys what queries of a panel contribute.
  void add_rows(Scratch& s, int64_t first, int64_t queries, int64_t from, int64_t rows,
                const T* visible) const {
    multiply_weights<P>(s.block.weights, rows, first, queries, s.grad_out_rows, p.value_dim,
                        s.grad_value + from * s.value_stride, visible);
    multiply_weights<P>(s.block.grad, rows, first, queries, s.query_rows, p.head_dim,
                        s.grad_key + from * s.head_stride, visible);
  }

  static bool pairs_gradients(const Scratch& s) {
    if constexpr (kDirect<P>) {
      return false;
    } else {
      return s.block.grad.in_float == nullptr;
    }
  }

  // Tells whether values of a block have no pieces, so that dP is not made of pieces alone.
  static bool special_values(const Scratch& s, int64_t from, int64_t rows) {
    if constexpr (kDirect<P>) {
      return false;
    } else {
      return s.value_rows.special(from, rows);
    }
  }

  // Returns how many keys a strip meets in the block that begins at `from` of the chunk; 0 if it sees none.
  static int64_t seen_rows(const GradientStrip<P>& strip, const Item& item, int64_t from, int64_t rows) {
    const int64_t stop = smaller(strip.keys.end - item.begin, item.keys), key = item.begin + from;
    if (from >= stop || key + kKeyBlock <= strip.keys.begin) return 0;
    return smaller(stop - from, rows);
  }

  // Computes a strip of the panel against `count` keys of the block: adds to dQ^T and prepares the operands
  // of add_rows. Returns false if all of the keys are hidden.
  bool add_strip(Scratch& s, const Item& item, int64_t i, int64_t from, int64_t count,
                 const PairedPlace& place, int64_t step, bool mark, bool paired) const {
    GradientStrip<P>& strip = s.strips[i];
    const int64_t key = item.begin + from;
    mask_sum.prefetch(s.mask, strip, from, count);
    const GradientBlock<P> block{key, count, from, &s.key_rows, &s.value_rows};
    if (!grad_score_block<P>(p, a, strip, block, s.block, mark, paired ? &place : nullptr)) return false;
    if (!paired) {
      T* grad = s.block.grad.block;
      mask_sum.add_block(s.mask, strip, step, from, count, grad);
      apply_function_gradient<P>(p.function, strip, key, count, s.block.block.given, grad);
      if (a.grad_slopes_rows != nullptr) add_slope_rows<P>(p, strip, key, count, grad, s.slope_rows[i]);
      if (p.softcap > 0.0) apply_softcap_gradient<P>(strip, count, s.block.block.capped, grad);
      s.block.weights.ready_as_rows(count, place.first_query, strip.count, place.rows);
      s.block.grad.ready_as_rows(count, place.first_query, strip.count, place.rows);
      s.block.grad.ready_as_lanes(count, strip.vecs);
    }
    multiply_strip_columns<P>(strip, s.key_columns, from, count, p.head_dim, s.block.grad,
                              {s.grad_query_t[i]}, mark ? s.block.visible : nullptr);
    return true;
  }

  // Waits for the chunk before, then writes (first chunk) or adds to dQ and the slope sums of strip i of the
  // panel, which begins with query `first`.
  void publish(Scratch& s, const Item& item, const Panel& panel, int64_t i, int64_t head, int64_t first,
               int64_t done) const {
    const int64_t count = panel.counts[i];
    const bool contributes = panel.contributes[i];
    // The wait is needed even with nothing to add: a later chunk relies on this one's count for all chunks
    // before it.
    if (!item.is_first()) {
      const std::atomic<int64_t>& before = strips_done[item.number - heads_kv];
      while (before.load(std::memory_order_acquire) <= done) std::this_thread::yield();
    }
    const bool last = item.chunk == chunks - 1;
    if (!contributes && !item.is_first() && !(last && a.workspace != nullptr)) return;
    T *grad_query_t = s.grad_query_t[i], *slope_rows = s.slope_rows[i];
    if (!contributes) {
      memset(grad_query_t, 0, static_cast<size_t>(p.head_dim * kLanes<P>) * sizeof(T));
      memset(slope_rows, 0, static_cast<size_t>(kLanes<P>) * sizeof(T));
    }
    if (a.grad_slopes_rows != nullptr) {
      T* slopes = static_cast<T*>(a.grad_slopes_rows) + p.row(item.batch, head, first);
      for (int64_t lane = 0; lane < count; ++lane) {
        slopes[lane] = item.is_first() ? slope_rows[lane] : slopes[lane] + slope_rows[lane];
      }
    }
    s.query_sums.publish(p, a, item.batch, head, first, count, item.is_first(), last, grad_query_t);
  }

  void sink_gradients(const GradientStrip<P>& strip) const {
    if (a.grad_sinks_rows == nullptr) return;
    const T sink = head_scalar<T>(p.sinks, strip.batch, strip.head);
    const int64_t row = strip.row(p);
    T* rows = static_cast<T*>(a.grad_sinks_rows) + row;
    for (int64_t lane = 0; lane < strip.count; ++lane) {
      rows[lane] =
          sink_gradient(a, row + lane, sink, strip.row_max[lane], strip.inverse_sum[lane], strip.delta[lane]);
    }
  }
};

// Computes each element as if it were alone.
template <class P>
void backward_sequences(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  auto calls = element_calls(p, a, 0, kAnyQueries);
  typename MaskSum<P>::Chain sharers;
  const bool share_mask = MaskSum<P>::takes(a) && a.grad_mask.stride[0] == 0;
  if (share_mask) {
    // An item's keys are limited, so its work grows with its queries: this order balances the threads, too.
    most_queries_first(calls);
  }
  char* workspace = static_cast<char*>(a.workspace);
  for (auto& call : calls) {
    const size_t bytes = backward_workspace<P>(call.params);
    call.results.workspace = bytes > 0 ? workspace : nullptr;
    workspace += bytes;
  }
  const auto joint = joint_task<BackwardTask<P>>(calls, share_mask ? &sharers : nullptr);
  for_each_item(pool, joint.items(), joint);
  if (a.grad_mask.data != nullptr && !MaskSum<P>::takes(a)) mask_gradient<P>(p, a, calls, pool);
}

template <class P>
void backward_pass(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  if (p.sequences.any()) return backward_sequences<P>(p, a, pool);
  const BackwardTask<P> task(p, a);
  for_each_item(pool, task.items(), task, task.item_kind());
  if (a.grad_mask.data != nullptr && !MaskSum<P>::takes(a)) mask_gradient<P>(p, a, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
