// The gradient of a float mask, gathered by the backward's tasks as they compute dS. It is dS summed over the
// dimensions along which the mask was broadcast. Tasks that share elements of the mask add to them in
// ascending order, each waiting for the one before: as with dQ, the order of every sum depends on the shape
// alone, and a task that another waits for is running or done. Along the queries and keys that a task owns
// anyway, sums stay in its scratch.
//
// Packed sequences that share a mask do the same, one task after the other. Those with the most queries come
// first, so that the last sequence that added to a chunk of keys has had all queries that the next one has:
// each item waits for one counter of one item.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Items of the backward are numbered [chunk][batch][kv head]. An item walks over the strips of queries and,
// for each, over the heads of its group. A step is one head of one strip.
template <class P>
class MaskSum {
  using T = Scalar<P>;
  using S = Simd<T>;

 public:
  // The sums must be of the tensor's own type; other gradients are left to the pass of mask_gradient.h.
  static bool takes(const BackwardArguments& a) {
    return a.grad_mask.data != nullptr && a.grad_mask.dtype == dtype_of<T>();
  }

  // The progress of a call's items. A value counts the blocks of all steps so far; if the mask has no rows,
  // it is 1 when the item is done.
  struct Progress {
    int64_t queries, chunks, batch, kv_heads;
    std::unique_ptr<std::atomic<int64_t>[]> items;

    std::atomic<int64_t>* item(int64_t chunk, int64_t batch_index, int64_t kv_head) const {
      return &items[(chunk * batch + batch_index) * kv_heads + kv_head];
    }
  };
  // For calls of one batch element each that share their mask: the last call so far, for each chunk of keys.
  using Chain = std::vector<const Progress*>;

  // If there is a chain, the call becomes its last one.
  MaskSum(const AttentionParams& params, const BackwardArguments& arguments, int64_t chunk, int64_t chunks,
          Chain* chain)
      : p(params),
        g(arguments.grad_mask),
        active(takes(arguments)),
        group(params.heads / params.kv_heads),
        blocks(divide_up(chunk, kKeyBlock)),
        // An only query or key is summed as if there were others, as in a packed batch. This does not hold if
        // sequences share the mask, because all of them must agree on what they wait for.
        has_rows(g.stride[2] != 0 || (chain == nullptr && params.queries == 1)),
        has_columns(g.stride[3] != 0 || (chain == nullptr && params.keys == 1)) {
    if (!active) return;
    const size_t items = static_cast<size_t>(chunks * p.batch * p.kv_heads);
    progress.reset(new Progress{p.queries, chunks, p.batch, p.kv_heads, nullptr});
    progress->items.reset(new std::atomic<int64_t>[items]);
    for (size_t i = 0; i < items; ++i) progress->items[i].store(0, std::memory_order_relaxed);
    if (chain == nullptr) return;
    const size_t own = static_cast<size_t>(chunks);
    if (chain->size() < own) chain->resize(own, nullptr);
    earlier.assign(chain->begin(), chain->begin() + chunks);
    std::fill(chain->begin(), chain->begin() + chunks, progress.get());
  }

  struct Scratch {
    std::atomic<int64_t>* item;
    const std::atomic<int64_t>* before;  // the item that adds to the same elements first; nullable
    // The queries of that item, and the strips counted so far with the query that ends them. Its strips may
    // differ from this item's at the end of its queries.
    int64_t queries_before, strips_before, end_before;
    int64_t batch, first_head, begin, keys;
    // Sums that are added to the tensor at the end: [kLanes], of one step, if the mask has rows but no
    // columns; [group or 1][keys], of the item, if it has columns but no rows.
    T* sums;
    // The item's sums if the mask has neither, [group or 1]. They are double, because blocks are of any size
    // and all rows together may add up to 0.
    double* totals;

    // There is room for every kind of sums, as sequences of a batch differ in theirs.
    SELFATTN_OUT_OF_LINE void allocate(const MaskSum& m, int64_t chunk_rows, Arena& arena) {
      sums = arena.take<T>(m.active ? std::max<int64_t>(kLanes<P>, m.group * chunk_rows) : 0);
      totals = arena.take<double>(m.active ? m.group : 0);
    }
  };

  void begin_item(Scratch& s, int64_t chunk, int64_t batch, int64_t kv_head, int64_t begin,
                  int64_t keys) const {
    if (!active) return;
    s.batch = batch;
    s.first_head = kv_head * group;
    s.begin = begin;
    s.keys = keys;
    s.item = progress->item(chunk, batch, kv_head);
    s.before = nullptr;
    s.queries_before = p.queries;
    s.strips_before = s.end_before = 0;
    const int64_t last_head = kept(1) ? kv_head : p.kv_heads - 1;
    if (!kept(1) && kv_head > 0) {
      s.before = progress->item(chunk, batch, kv_head - 1);
    } else if (!kept(0) && batch > 0) {
      s.before = progress->item(chunk, batch - 1, last_head);
    } else if (!kept(3) && chunk > 0) {
      s.before = progress->item(chunk - 1, kept(0) ? batch : p.batch - 1, last_head);
    } else if (!earlier.empty() && earlier[chunk] != nullptr) {
      const Progress& other = *earlier[chunk];
      s.before = other.item(kept(3) ? chunk : other.chunks - 1, 0, last_head);
      s.queries_before = other.queries;
    }
    memset(s.sums, 0, static_cast<size_t>(kept(2) ? kLanes<P> : rows() * keys) * sizeof(T));
    memset(s.totals, 0, static_cast<size_t>(rows()) * sizeof(double));
  }

  // Prefetches the elements that add_block will add to: the products until then hide the latency of memory.
  void prefetch(const Scratch& s, const QueryStrip<P>& strip, int64_t from, int64_t keys) const {
    if (!active || !kept(2) || !kept(3)) return;
    const T* corner = data(s, strip.head) + strip.first * g.stride[2] + s.begin + from;
    prefetch_block(corner, g.stride[2] * sizeof(T), strip.count, keys * sizeof(T));
  }

  // Adds dS of the keys begin + from .. begin + from + keys - 1 of a step.
  void add_block(Scratch& s, const QueryStrip<P>& strip, int64_t step, int64_t from, int64_t keys,
                 T* grad) const {
    if (!active) return;
    if (kept(2) && kept(3)) {
      const int64_t done = from / kKeyBlock + 1;
      wait(s, strip.first + strip.count, step, done);
      add_transposed(data(s, strip.head) + strip.first * g.stride[2] + s.begin + from, strip.count, keys,
                     grad);
      publish(s, step * blocks + done);
      return;
    }
    clear_past_last<P>(strip, keys, grad);
    if (!kept(3)) {
      for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
        const auto sum = sum_over_keys<T>(grad + lane, keys, kLanes<P>);
        if (kept(2)) {
          S::store(s.sums + lane, S::add(S::load(s.sums + lane), sum));
          continue;
        }
        T rows_of_vector[S::kWidth];
        S::store(rows_of_vector, sum);
        for (const T row : rows_of_vector) s.totals[row_of(s, strip.head)] += static_cast<double>(row);
      }
      return;
    }
    // Transposing turns a vector per key into a vector of keys per lane.
    T* sums = s.sums + row_of(s, strip.head) * s.keys + from;
    for (int64_t column = 0; column < keys; column += S::kWidth) {
      const int64_t n = smaller(keys - column, S::kWidth);
      typename S::Vec tile[S::kWidth];
      for (int i = 0; i < S::kWidth; ++i) {
        tile[i] = S::set(T(0));
        for (int64_t lane = 0; i < n && lane < strip.vecs * S::kWidth; lane += S::kWidth) {
          tile[i] = S::add(tile[i], S::load(grad + (column + i) * kLanes<P> + lane));
        }
      }
      transpose<T>(tile);
      for (int i = 1; i < S::kWidth; ++i) tile[0] = S::add(tile[0], tile[i]);
      add_to_row(sums + column, n, tile[0]);
    }
  }

  // Must be called for every step, whether it has seen a block or not: a later item relies on this one's
  // count for all items before it.
  void end_step(Scratch& s, int64_t head, int64_t first, int64_t count, int64_t step) const {
    if (!active || !kept(2)) return;
    wait(s, first + count, step, blocks);
    if (!kept(3)) {
      T* rows = data(s, head) + first * g.stride[2];
      for (int64_t lane = 0; lane < count; ++lane) rows[lane * g.stride[2]] += s.sums[lane];
      memset(s.sums, 0, static_cast<size_t>(kLanes<P>) * sizeof(T));
    }
    publish(s, (step + 1) * blocks);
  }

  void end_item(Scratch& s) const {
    if (!active || kept(2)) return;
    wait(s, 0, 0, 1);
    for (int64_t head = 0; head < rows(); ++head) {
      T* row = data(s, s.first_head + head);
      if (!kept(3)) row[0] = static_cast<T>(static_cast<double>(row[0]) + s.totals[head]);
      for (int64_t j = 0; kept(3) && j < s.keys; ++j) row[s.begin + j] += s.sums[head * s.keys + j];
    }
    publish(s, 1);
  }

 private:
  const AttentionParams& p;
  const View& g;
  const bool active;
  const int64_t group, blocks;  // heads of a kv head, blocks of keys in a chunk
  const bool has_rows, has_columns;
  std::unique_ptr<Progress> progress;  // stays in its place while calls are moved, as others look at it
  Chain earlier;                       // [chunks], or empty

  // Tells whether the mask has this dimension; one of size 1 may count as broadcast.
  bool kept(int dimension) const {
    return dimension == 2 ? has_rows : (dimension == 3 ? has_columns : g.stride[dimension] != 0);
  }
  // The rows of sums of an item that sums over its queries, and the row of a head.
  int64_t rows() const { return kept(1) ? group : 1; }
  int64_t row_of(const Scratch& s, int64_t head) const { return kept(1) ? head - s.first_head : 0; }
  T* data(const Scratch& s, int64_t head) const {
    return static_cast<T*>(g.data) + s.batch * g.stride[0] + head * g.stride[1];
  }

  // Waits until the item before is past `done` blocks of the step that holds the queries before `end`. Heads
  // that share the mask take turns strip by strip: all heads of that item's group come before the first of
  // this one's.
  void wait(Scratch& s, int64_t end, int64_t step, int64_t done) const {
    if (s.before == nullptr) return;
    int64_t target = done;
    if (kept(2)) {
      while (s.end_before < end) {
        s.end_before += strip_queries<P>(s.end_before, s.queries_before);
        ++s.strips_before;
      }
      const int64_t head = kept(1) ? step % group : group - 1;
      target += ((s.strips_before - 1) * group + head) * blocks;
    }
    while (s.before->load(std::memory_order_acquire) < target) std::this_thread::yield();
  }
  void publish(const Scratch& s, int64_t done) const { s.item->store(done, std::memory_order_release); }

  static SELFATTN_INLINE void add_to_row(T* to, int64_t n, typename S::Vec x) {
    store_row<T>(to, dtype_of<T>(), n, S::add(load_row<T>(to, dtype_of<T>(), n), x));
  }

  // to(row lane, column) += grad[column][lane]
  void add_transposed(T* to, int64_t rows, int64_t columns, const T* grad) const {
    for (int64_t lane = 0; lane < rows; lane += S::kWidth) {
      const int64_t lanes = smaller(rows - lane, S::kWidth);
      for (int64_t column = 0; column < columns; column += S::kWidth) {
        const int64_t n = smaller(columns - column, S::kWidth);
        typename S::Vec tile[S::kWidth];
        T* corner = to + lane * g.stride[2] + column;
        if (n == S::kWidth && lanes == S::kWidth) {
          SELFATTN_UNROLL
          for (int i = 0; i < S::kWidth; ++i) tile[i] = S::load(grad + (column + i) * kLanes<P> + lane);
          transpose<T>(tile);
          SELFATTN_UNROLL
          for (int i = 0; i < S::kWidth; ++i) {
            T* row = corner + i * g.stride[2];
            S::store(row, S::add(S::load(row), tile[i]));
          }
          continue;
        }
        for (int i = 0; i < S::kWidth; ++i) {
          tile[i] = i < n ? S::load(grad + (column + i) * kLanes<P> + lane) : S::set(T(0));
        }
        transpose<T>(tile);
        for (int64_t i = 0; i < lanes; ++i) add_to_row(corner + i * g.stride[2], n, tile[i]);
      }
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
