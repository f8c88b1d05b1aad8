// The gradient of a float mask, gathered by the tasks of the backward as they come by dS: dS summed over the
// dimensions along which the mask was broadcast. Tasks that share elements of the mask add to them in
// ascending order, each waiting for the one before: as with dQ, the order of every sum depends on the shape
// alone, and whoever is waited for is running or done. Along the queries and keys that a task owns anyway,
// sums stay in its scratch.
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

  MaskSum(const AttentionParams& params, const BackwardArguments& arguments, int64_t chunk, int64_t chunks)
      : p(params),
        g(arguments.grad_mask),
        active(takes(arguments)),
        group(params.heads / params.kv_heads),
        blocks((chunk + kKeyBlock - 1) / kKeyBlock) {
    if (!active) return;
    const int64_t items = chunks * p.batch * p.kv_heads;
    progress.reset(new std::atomic<int64_t>[static_cast<size_t>(items)]);
    for (int64_t i = 0; i < items; ++i) progress[i].store(0, std::memory_order_relaxed);
  }

  struct Scratch {
    int64_t item, before;  // the item that adds to the same elements first; -1 where there is none
    int64_t batch, first_head, begin, keys;
    // What is summed up before it meets the tensor. Where the mask has rows but no columns [kLanes], of one
    // step; where it has no rows [group or 1][keys or 1], of the item.
    T* sums;

    static int64_t size(const MaskSum& m, int64_t chunk_rows) {
      if (!m.active) return 0;
      return m.kept(2) ? kLanes<P> : (m.kept(1) ? m.group : 1) * (m.kept(3) ? chunk_rows : 1);
    }
    static int64_t bytes(const MaskSum& m, int64_t chunk_rows) {
      return Arena::bytes_for<T>(size(m, chunk_rows));
    }
    void allocate(const MaskSum& m, int64_t chunk_rows, Arena& arena) {
      sums = arena.take<T>(size(m, chunk_rows));
    }
  };

  void begin_item(Scratch& s, int64_t chunk, int64_t batch, int64_t kv_head, int64_t begin,
                  int64_t keys) const {
    if (!active) return;
    s.batch = batch;
    s.first_head = kv_head * group;
    s.begin = begin;
    s.keys = keys;
    s.item = number(chunk, batch, kv_head);
    if (!kept(1) && kv_head > 0) {
      s.before = number(chunk, batch, kv_head - 1);
    } else if (!kept(0) && batch > 0) {
      s.before = number(chunk, batch - 1, kept(1) ? kv_head : p.kv_heads - 1);
    } else if (!kept(3) && chunk > 0) {
      s.before = number(chunk - 1, kept(0) ? batch : p.batch - 1, kept(1) ? kv_head : p.kv_heads - 1);
    } else {
      s.before = -1;
    }
    memset(s.sums, 0, static_cast<size_t>(Scratch::size(*this, keys)) * sizeof(T));
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
      wait(s, step, done);
      add_transposed(data(s, strip.head) + strip.first * g.stride[2] + s.begin + from, strip.count, keys,
                     grad);
      publish(s, step * blocks + done);
      return;
    }
    // Lanes past the last query may see keys that no query does; nothing of theirs belongs into a sum.
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t lane = strip.count; lane < strip.vecs * S::kWidth; ++lane)
        grad[j * kLanes<P> + lane] = T(0);
    }
    if (kept(2)) {
      for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
        auto sum = S::load(s.sums + lane);
        for (int64_t j = 0; j < keys; ++j) sum = S::add(sum, S::load(grad + j * kLanes<P> + lane));
        S::store(s.sums + lane, sum);
      }
      return;
    }
    // A vector per key, turned, is a vector of keys per lane.
    T* sums = s.sums + row_of(s, strip.head) * (kept(3) ? s.keys : 1) + (kept(3) ? from : 0);
    for (int64_t column = 0; column < keys; column += S::kWidth) {
      const int64_t n = keys - column < S::kWidth ? keys - column : S::kWidth;
      typename S::Vec tile[S::kWidth];
      for (int i = 0; i < S::kWidth; ++i) {
        tile[i] = S::set(T(0));
        for (int64_t lane = 0; i < n && lane < strip.vecs * S::kWidth; lane += S::kWidth) {
          tile[i] = S::add(tile[i], S::load(grad + (column + i) * kLanes<P> + lane));
        }
      }
      transpose<T>(tile);
      for (int i = 1; i < S::kWidth; ++i) tile[0] = S::add(tile[0], tile[i]);
      if (kept(3)) {
        add_to_row(sums + column, n, tile[0]);
      } else {
        T lanes[S::kWidth];
        S::store(lanes, tile[0]);
        for (int64_t i = 0; i < n; ++i) sums[0] += lanes[i];
      }
    }
  }

  // To be called for every step, whether it has seen a block or not: a later item takes this one's word that
  // all before it are done.
  void end_step(Scratch& s, int64_t head, int64_t first, int64_t count, int64_t step) const {
    if (!active || !kept(2)) return;
    wait(s, step, blocks);
    if (!kept(3)) {
      T* rows = data(s, head) + first * g.stride[2];
      for (int64_t lane = 0; lane < count; ++lane) rows[lane * g.stride[2]] += s.sums[lane];
      memset(s.sums, 0, static_cast<size_t>(kLanes<P>) * sizeof(T));
    }
    publish(s, (step + 1) * blocks);
  }

  void end_item(Scratch& s) const {
    if (!active || kept(2)) return;
    wait(s, 0, 1);
    const int64_t columns = kept(3) ? s.keys : 1;
    for (int64_t head = 0; head < (kept(1) ? group : 1); ++head) {
      T* row = data(s, s.first_head + head) + (kept(3) ? s.begin : 0);
      for (int64_t j = 0; j < columns; ++j) row[j] += s.sums[head * columns + j];
    }
    publish(s, 1);
  }

 private:
  const AttentionParams& p;
  const View& g;
  const bool active;
  const int64_t group, blocks;  // heads of a kv head, blocks of keys in a chunk
  // [items] How far an item is: blocks of all its steps so far; without rows in the mask, 1 when it is done.
  std::unique_ptr<std::atomic<int64_t>[]> progress;

  // Whether the mask has this dimension. A size of 1 may be called broadcast.
  bool kept(int dimension) const { return g.stride[dimension] != 0; }
  int64_t number(int64_t chunk, int64_t batch, int64_t kv_head) const {
    return (chunk * p.batch + batch) * p.kv_heads + kv_head;
  }
  int64_t row_of(const Scratch& s, int64_t head) const { return kept(1) ? head - s.first_head : 0; }
  T* data(const Scratch& s, int64_t head) const {
    return static_cast<T*>(g.data) + s.batch * g.stride[0] + head * g.stride[1];
  }

  // Until the item before is past `done` blocks of this step. Heads that share the mask take turns strip by
  // strip: all heads of its group come before the first of this one.
  void wait(const Scratch& s, int64_t step, int64_t done) const {
    if (s.before < 0) return;
    if (kept(2) && !kept(1)) step += group - 1 - step % group;
    const int64_t target = kept(2) ? step * blocks + done : done;
    while (progress[s.before].load(std::memory_order_acquire) < target) std::this_thread::yield();
  }
  void publish(const Scratch& s, int64_t done) const {
    progress[s.item].store(done, std::memory_order_release);
  }

  static SELFATTN_INLINE void add_to_row(T* to, int64_t n, typename S::Vec x) {
    store_row<T>(to, dtype_of<T>(), n, S::add(load_row<T>(to, dtype_of<T>(), n), x));
  }

  // to(row lane, column) += grad[column][lane]
  void add_transposed(T* to, int64_t rows, int64_t columns, const T* grad) const {
    for (int64_t lane = 0; lane < rows; lane += S::kWidth) {
      const int64_t lanes = rows - lane < S::kWidth ? rows - lane : S::kWidth;
      for (int64_t column = 0; column < columns; column += S::kWidth) {
        const int64_t n = columns - column < S::kWidth ? columns - column : S::kWidth;
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
