// The gradient of a float mask, gathered by the tasks of the backward as they come by dS: dS summed over the
// dimensions along which the mask was broadcast. Tasks that share elements of the mask add to them in
// ascending order, each waiting for the one before: as with dQ, the order of every sum depends on the shape
// alone, and whoever is waited for is running or done. Along the queries and keys that a task owns anyway,
// sums stay in its scratch.
//
// Packed sequences that share a mask do the same, one task behind the other. They come with the most queries
// first, so that whoever added to a chunk of keys last has had all queries that the next one has: one counter
// of one item is all there is to wait for.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Items of the backward are numbered [chunk][batch][kv head] and walk over the strips of queries, in each
// over the heads of their group. A step is one head of one strip.
template <class P>
class MaskSum {
  using T = Scalar<P>;
  using S = Simd<T>;

 public:
  // Sums must be in the tensor's own type; others are left to the pass of mask_gradient.h.
  static bool takes(const BackwardArguments& a) {
    return a.grad_mask.data != nullptr && a.grad_mask.dtype == dtype_of<T>();
  }

  // How far the items of a call are. A value counts blocks of all steps so far; without rows in the mask it
  // is 1 when the item is done.
  struct Progress {
    int64_t queries, chunks, batch, kv_heads;
    std::unique_ptr<std::atomic<int64_t>[]> items;

    std::atomic<int64_t>* item(int64_t chunk, int64_t batch_index, int64_t kv_head) const {
      return &items[(chunk * batch + batch_index) * kv_heads + kv_head];
    }
  };
  // Calls of one batch element each that share their mask: for each chunk of keys, who came last.
  using Chain = std::vector<const Progress*>;

  // With a chain the call becomes its last one.
  MaskSum(const AttentionParams& params, const BackwardArguments& arguments, int64_t chunk, int64_t chunks,
          Chain* chain)
      : p(params),
        g(arguments.grad_mask),
        active(takes(arguments)),
        group(params.heads / params.kv_heads),
        blocks(divide_up(chunk, kKeyBlock)),
        // The one query or key of a sequence is summed as if there were others, as it is in a packed batch.
        // Not where sequences share the mask: there all of them must agree on what they wait for.
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
    // Strips of that item until one that this one waits for, and the queries of all of them. They may be
    // others than its own at the end of its queries.
    int64_t queries_before, strips_before, end_before;
    int64_t batch, first_head, begin, keys;
    // What is summed up before it meets the tensor. Where the mask has rows but no columns [kLanes], of one
    // step; where it has columns but no rows [group or 1][keys], of the item.
    T* sums;
    // Where it has neither [group or 1], of the item: blocks are of any size, and all rows together may be 0.
    double* totals;

    // Room for every kind of sums: sequences of a batch differ in theirs.
    static int64_t most_sums(const MaskSum& m, int64_t chunk_rows) {
      return m.active ? std::max<int64_t>(kLanes<P>, m.group * chunk_rows) : 0;
    }
    static int64_t most_totals(const MaskSum& m) { return m.active ? m.group : 0; }
    static int64_t bytes(const MaskSum& m, int64_t chunk_rows) {
      return Arena::bytes_for<T>(most_sums(m, chunk_rows)) + Arena::bytes_for<double>(most_totals(m));
    }
    void allocate(const MaskSum& m, int64_t chunk_rows, Arena& arena) {
      sums = arena.take<T>(most_sums(m, chunk_rows));
      totals = arena.take<double>(most_totals(m));
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

  // Asks for the elements that add_block is going to add to: the products until then hide the way to memory.
  void prefetch(const Scratch& s, const QueryStrip<P>& strip, int64_t from, int64_t keys) const {
    if (!active || !kept(2) || !kept(3)) return;
    const T* corner = data(s, strip.head) + strip.first * g.stride[2] + s.begin + from;
    prefetch_block(corner, g.stride[2] * sizeof(T), strip.count, keys * sizeof(T));
  }

  // dS of the keys begin + from .. begin + from + keys - 1 of a step.
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
    // A vector per key, turned, is a vector of keys per lane.
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

  // To be called for every step, whether it has seen a block or not: a later item takes this one's word that
  // all before it are done.
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
  std::unique_ptr<Progress> progress;  // in its place while calls are moved, as others look at it
  Chain earlier;                       // [chunks], or empty

  // Whether the mask has this dimension. A size of 1 may be called broadcast.
  bool kept(int dimension) const {
    return dimension == 2 ? has_rows : (dimension == 3 ? has_columns : g.stride[dimension] != 0);
  }
  // Rows of an item that is summed over its queries, and which of them is a head's.
  int64_t rows() const { return kept(1) ? group : 1; }
  int64_t row_of(const Scratch& s, int64_t head) const { return kept(1) ? head - s.first_head : 0; }
  T* data(const Scratch& s, int64_t head) const {
    return static_cast<T*>(g.data) + s.batch * g.stride[0] + head * g.stride[1];
  }

  // Until the item before is past `done` blocks of the step with the queries before `end`. Heads that share
  // the mask take turns strip by strip: all heads of its group come before the first of this one.
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
