// The backward of selected keys. An item owns the gradients of a chunk of the keys of a kv head, and goes
// through the queries that selected some of them. Gradients of queries are gathered from one chunk after
// another, in the order of chunks, as in fused/backward.h: the order of every sum follows from the lists
// alone.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "backward_rows.h"
#include "deltas.h"
#include "forward_tile.h"
#include "gradient_tile.h"
#include "selected_calls.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
class SelectedBackward {
  using T = Scalar<P>;

 public:
  SelectedBackward(const AttentionParams& params, const BackwardArguments& arguments,
                   const SelectedWorkspace<P>& rows)
      : p(params),
        a(arguments),
        workspace(rows),
        by_blocks(goes_by_blocks(params)),
        by_rows(kDirect<P> && goes_by_rows(params)),
        chunk(by_rows ? chunk_of_rows(params) : chunk_keys<P>(params)),
        chunks(larger(divide_up(params.keys, chunk), 1)),
        heads_kv(params.batch * params.kv_heads),
        unit_heads(by_blocks ? 1 : smaller(p.heads / p.kv_heads, p.selection.heads_per_list)),
        steps_done(new std::atomic<int64_t>[static_cast<size_t>(chunks * heads_kv)]) {
    for (int64_t item = 0; item < items(); ++item) steps_done[item].store(0, std::memory_order_relaxed);
    constexpr int64_t kStrips = 4, kCache = 512 * 1024;
    const Selection& s = p.selection;
    const int64_t row_bytes = larger(round_up_to_vector<T>(p.head_dim), 1) * unit_heads * sizeof(T),
                  shared = by_blocks ? kStrips * kLanes<P> * blocks_of(p) / larger(s.longest, 1) : 64;
    unit_queries = limited(smaller(shared, kCache / row_bytes), 1, larger(p.queries, 1));
    if (by_blocks) build_lists();
  }
  int64_t items() const { return chunks * heads_kv; }

  struct Parts {
    SelectedGradientScratch<P> tile;
    SelectedGradientRows<T> heads;
    TileRows<P> rows;
    int64_t at[kLanes<P>];             // the place of each lane's row among those of the unit
    KeySums<T> chunk_sums, scattered;  // scattered are those of a tile whose keys are not neighbours
    RowSums<T> grad_query;             // of the unit, [query][head]
    T* slopes;                         // likewise
    bool* touched;                     // likewise
    T* ones;                           // [kLanes]

    SELFATTN_OUT_OF_LINE void allocate(const SelectedBackward& task, Arena& arena) {
      // Tiles of the processor add to sixteen rows at once.
      constexpr int64_t kTileRows = 16;
      const int64_t most = smaller(task.chunk, larger(task.p.keys, 1)) + kTileRows,
                    units = task.unit_queries * task.unit_heads;
      if (task.by_rows) {
        heads.allocate(task.p, task.unit_heads, arena);
      } else {
        tile.allocate(task.p, task.by_blocks ? most : kKeyBlock, arena);
      }
      const auto sums = [&](RowSums<T>& rows, int64_t count, int64_t columns) {
        rows.stride = round_up_to_vector<T>(columns);
        rows.data = arena.take<T>(count * rows.stride);
      };
      sums(chunk_sums.key, most, task.p.head_dim);
      sums(chunk_sums.value, most, task.p.value_dim);
      sums(scattered.key, kKeyBlock, task.p.head_dim);
      sums(scattered.value, kKeyBlock, task.p.value_dim);
      sums(grad_query, units, task.p.head_dim);
      slopes = arena.take<T>(units);
      touched = arena.take<bool>(units);
      ones = arena.take_filled<T>(kLanes<P>, T(1));
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    s.lay_out(*this);
    const int64_t index = item / heads_kv, batch = item % heads_kv / p.kv_heads, kv_head = item % p.kv_heads,
                  group = p.heads / p.kv_heads;
    const KeyRange keys{index * chunk, smaller((index + 1) * chunk, p.keys)};
    s.rows.begin(batch, kv_head);
    clear(s.chunk_sums, keys.end - keys.begin);
    int64_t done = 0;
    for (int64_t first = 0; first < p.queries; first += unit_queries) {
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head += unit_heads) {
        const Unit unit{first, smaller(first + unit_queries, p.queries), head};
        begin_unit(s, unit);
        if (by_blocks) {
          meet_blocks(s, unit, keys);
        } else if (by_rows) {
          meet_rows(s, unit, keys);
        } else {
          meet_queries(s, unit, keys);
        }
        publish(s, unit, index, item, done);
        steps_done[item].store(++done, std::memory_order_release);
      }
    }
    const int64_t count = keys.end - keys.begin;
    store_sums<T>(a.grad_key, p.dtype, batch, kv_head, keys.begin, count, p.head_dim,
                  {s.chunk_sums.key.data, s.chunk_sums.key.stride}, by_rows ? T(1) : static_cast<T>(p.scale));
    store_sums<T>(a.grad_value, p.dtype, batch, kv_head, keys.begin, count, p.value_dim,
                  {s.chunk_sums.value.data, s.chunk_sums.value.stride}, T(1));
  }

 private:
  const AttentionParams& p;
  const BackwardArguments& a;
  SelectedWorkspace<P> workspace;
  bool by_blocks, by_rows;
  int64_t chunk, chunks, heads_kv;
  int64_t unit_heads, unit_queries;
  std::unique_ptr<std::atomic<int64_t>[]>
      steps_done;                   // [chunks][heads_kv] units whose dQ the chunk has added
  std::vector<InverseLists> lists;  // of each list of heads of each batch element

  // The queries first .. end - 1 of the heads head .. head + unit_heads - 1.
  struct Unit {
    int64_t first, end, head;
  };

  // Returns the keys of a chunk for few heads, whose tiles are those of one query: what begins and ends them
  // shows if a query has few keys in a chunk. Long sequences have enough chunks for the threads all the same.
  static int64_t chunk_of_rows(const AttentionParams& p) {
    constexpr int64_t kFewestChunks = 16, kMostBytes = 2 * 1024 * 1024;
    const int64_t row = (round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim)) * sizeof(T),
                  most = smaller(kMostBytes / larger(row, 1), 2048);
    return larger(smaller(round_up(p.keys / kFewestChunks, kKeyBlock), most), chunk_keys<P>(p));
  }

  int64_t list_heads() const { return p.heads / p.selection.heads_per_list; }
  void build_lists() {
    const int64_t batches = p.selection.stride[0] == 0 ? 1 : p.batch;
    lists.resize(static_cast<size_t>(batches * list_heads()));
    for (size_t i = 0; i < lists.size(); ++i) {
      const int64_t n = static_cast<int64_t>(i), head = n % list_heads() * p.selection.heads_per_list;
      lists[i].build(p.selection, n / list_heads(), head, 0, p.selection.rows, blocks_of(p));
    }
  }
  const InverseLists& lists_of(int64_t batch, int64_t head) const {
    const int64_t element = p.selection.stride[0] == 0 ? 0 : batch;
    return lists[static_cast<size_t>(element * list_heads() + head / p.selection.heads_per_list)];
  }

  static void clear(const KeySums<T>& sums, int64_t rows) {
    memset(sums.key.data, 0, static_cast<size_t>(rows * sums.key.stride) * sizeof(T));
    memset(sums.value.data, 0, static_cast<size_t>(rows * sums.value.stride) * sizeof(T));
  }
  static KeySums<T> from(const KeySums<T>& sums, int64_t row) {
    return {{sums.key.data + row * sums.key.stride, sums.key.stride},
            {sums.value.data + row * sums.value.stride, sums.value.stride}};
  }

  void begin_unit(Scratch& s, const Unit& unit) const {
    const int64_t rows = (unit.end - unit.first) * unit_heads;
    memset(s.grad_query.data, 0, static_cast<size_t>(rows * s.grad_query.stride) * sizeof(T));
    memset(s.slopes, 0, static_cast<size_t>(rows) * sizeof(T));
    memset(s.touched, 0, static_cast<size_t>(rows));
  }

  // Adds a row to the strip that is being gathered.
  void add_row(Scratch& s, const Unit& unit, int64_t head, int64_t query) const {
    s.at[s.rows.count] = (query - unit.first) * unit_heads + head - unit.head;
    s.rows.add(head, query);
  }
  void end_strip(Scratch& s) const {
    add_transposed<P>(s.grad_query, s.at, s.rows.count, p.head_dim, s.tile.grad_query_t, s.ones);
    for (int64_t lane = 0; lane < s.rows.count; ++lane) {
      s.slopes[s.at[lane]] += s.tile.slope_rows[lane];
      s.touched[s.at[lane]] = true;
    }
    s.rows.count = 0;
  }

  static bool well_behaved(const RowOperand<P>& operand, int64_t rows, int64_t columns) {
    if constexpr (kDirect<P>) return all_finite(operand.rows.data, operand.rows.stride, rows, columns);
    return true;
  }

  // Tiles of each block of the chunk and the queries of the unit that selected it.
  void meet_blocks(Scratch& s, const Unit& unit, KeyRange keys) const {
    const InverseLists& inverse = lists_of(s.rows.batch, unit.head);
    const int64_t size = p.selection.key_size, queries = p.selection.query_size;
    for (int64_t block = keys.begin / size; block * size < keys.end; ++block) {
      const KeyRange part{larger(block * size, keys.begin), smaller((block + 1) * size, keys.end)};
      const int32_t* row =
          std::lower_bound(inverse.begin_of(block), inverse.end_of(block), unit.first / queries);
      bool loaded = false, finite = true;
      const auto meet = [&] {
        if (s.rows.count == 0) return;
        if (!loaded) {
          const int64_t count = part.end - part.begin;
          s.tile.load_keys(
              row_source(p.key, p.dtype, s.rows.batch, s.rows.kv_head, part.begin, count, p.head_dim),
              row_source(p.value, p.dtype, s.rows.batch, s.rows.kv_head, part.begin, count, p.value_dim));
          finite =
              well_behaved(s.tile.keys, count, p.head_dim) && well_behaved(s.tile.values, count, p.value_dim);
          loaded = true;
        }
        s.tile.begin(p, a, s.rows, !by_blocks, workspace.deltas);
        for (int64_t key = part.begin; key < part.end; key += kKeyBlock) {
          const TileKeys tile = TileKeys::neighbours(key, smaller(part.end - key, kKeyBlock));
          gradient_tile<P>(p, s.rows, tile, key - part.begin, finite, from(s.chunk_sums, key - keys.begin),
                           s.tile);
        }
        end_strip(s);
      };
      for (; row != inverse.end_of(block) && *row * queries < unit.end; ++row) {
        const int64_t end = smaller((*row + int64_t{1}) * queries, unit.end);
        for (int64_t query = larger(*row * queries, unit.first); query < end; ++query) {
          const KeyRange visible = visible_keys(p, query, query);
          if (visible.begin >= part.end || visible.end <= part.begin) continue;
          add_row(s, unit, unit.head, query);
          if (s.rows.count == kLanes<P>) meet();
        }
      }
      meet();
    }
  }

  // Tiles of the heads of each query and the keys of the chunk that it selected.
  void meet_queries(Scratch& s, const Unit& unit, KeyRange keys) const {
    for (int64_t query = unit.first; query < unit.end; ++query) {
      const KeyRange visible = visible_keys(p, query, query);
      const KeyRange range{larger(keys.begin, visible.begin), smaller(keys.end, visible.end)};
      for (int64_t head = unit.head; head < unit.head + unit_heads; head += kLanes<P>) {
        const int64_t end = smaller(head + kLanes<P>, unit.head + unit_heads);
        bool begun = false;
        SelectedList list = list_of(p, s.rows.batch, unit.head, query);
        for_each_tile(p, list, range, kKeyBlock, [&](const TileKeys& tile) {
          if (!begun) {
            for (int64_t h = head; h < end; ++h) add_row(s, unit, h, query);
            s.tile.begin(p, a, s.rows, !by_blocks, workspace.deltas);
            begun = true;
          }
          meet_tile(s, tile, keys.begin);
        });
        if (begun) end_strip(s);
      }
    }
  }
  void meet_tile(Scratch& s, const TileKeys& tile, int64_t first_key) const {
    s.tile.load_keys(
        gathered<P>(p, s.rows.batch, s.rows.kv_head, tile, p.key, p.head_dim, s.tile.key_rows),
        gathered<P>(p, s.rows.batch, s.rows.kv_head, tile, p.value, p.value_dim, s.tile.value_rows));
    const bool finite = well_behaved(s.tile.keys, tile.count, p.head_dim) &&
                        well_behaved(s.tile.values, tile.count, p.value_dim);
    if (tile.are_neighbours()) {
      return gradient_tile<P>(p, s.rows, tile, 0, finite, from(s.chunk_sums, tile.key[0] - first_key),
                              s.tile);
    }
    clear(s.scattered, tile.count);
    gradient_tile<P>(p, s.rows, tile, 0, finite, s.scattered, s.tile);
    const auto add = [&](const RowSums<T>& to, const RowSums<T>& rows) {
      for (int64_t j = 0; j < tile.count; ++j) {
        T* sum = to.data + (tile.key[j] - first_key) * to.stride;
        for (int64_t e = 0; e < to.stride; e += Simd<T>::kWidth) {
          const auto added = Simd<T>::load(rows.data + j * rows.stride + e);
          Simd<T>::store(sum + e, Simd<T>::add(Simd<T>::load(sum + e), added));
        }
      }
    };
    add(s.chunk_sums.key, s.scattered.key);
    add(s.chunk_sums.value, s.scattered.value);
  }

  // Tiles of few heads of each query and the keys of the chunk that it selected.
  void meet_rows(Scratch& s, const Unit& unit, KeyRange keys) const {
    for (int64_t query = unit.first; query < unit.end; ++query) {
      const KeyRange visible = visible_keys(p, query, query);
      const KeyRange range{larger(keys.begin, visible.begin), smaller(keys.end, visible.end)};
      const int64_t at = (query - unit.first) * unit_heads;
      bool begun = false;
      SelectedList list = list_of(p, s.rows.batch, unit.head, query);
      for_each_tile(p, list, range, TileKeys::kMost, [&](const TileKeys& tile) {
        if (!begun) {
          const RowSums<T> sums{s.grad_query.data + at * s.grad_query.stride, s.grad_query.stride};
          s.heads.begin(p, a, {s.rows.batch, unit.head, query}, workspace.deltas, sums, s.slopes + at);
          begun = true;
        }
        s.heads.meet(p, a, tile, s.chunk_sums, keys.begin);
      });
      for (int64_t i = 0; begun && i < unit_heads; ++i) s.touched[at + i] = true;
    }
  }

  // Waits for the chunk before, then writes (first chunk) or adds to dQ and the slope sums of a unit.
  void publish(Scratch& s, const Unit& unit, int64_t index, int64_t item, int64_t done) const {
    const bool is_first = index == 0, is_last = index == chunks - 1;
    if (!is_first) {
      const std::atomic<int64_t>& before = steps_done[item - heads_kv];
      while (before.load(std::memory_order_acquire) <= done) std::this_thread::yield();
    }
    for (int64_t query = unit.first; query < unit.end; ++query) {
      for (int64_t head = unit.head; head < unit.head + unit_heads; ++head) {
        const int64_t at = (query - unit.first) * unit_heads + head - unit.head;
        if (is_first || s.touched[at]) add_to_row(s, at, head, query, is_first);
        if (!is_last || workspace.grad_query == nullptr) continue;
        const T* sums = workspace.grad_query + p.row(s.rows.batch, head, query) * p.head_dim;
        store_sums<T>(a.grad_query, p.dtype, s.rows.batch, head, query, 1, p.head_dim, {sums, p.head_dim},
                      T(1));
      }
    }
  }
  void add_to_row(const Scratch& s, int64_t at, int64_t head, int64_t query, bool is_first) const {
    using S = Simd<T>;
    const int64_t row = p.row(s.rows.batch, head, query);
    const View& g = a.grad_query;
    T* const sums = workspace.grad_query != nullptr
                        ? workspace.grad_query + row * p.head_dim
                        : static_cast<T*>(g.data) + g.offset(s.rows.batch, head, query);
    const T* const added = s.grad_query.data + at * s.grad_query.stride;
    for (int64_t e = 0; e < p.head_dim; e += S::kWidth) {
      auto sum = S::mul(S::load(added + e), S::set(static_cast<T>(p.scale)));
      if (!is_first) sum = S::add(sum, load_row<T>(sums + e, dtype_of<T>(), p.head_dim - e));
      store_row<T>(sums + e, dtype_of<T>(), p.head_dim - e, sum);
    }
    if (a.grad_slopes_rows == nullptr) return;
    T& slope = static_cast<T*>(a.grad_slopes_rows)[row];
    slope = is_first ? s.slopes[at] : slope + s.slopes[at];
  }
};

template <class P>
size_t selected_backward_workspace(const AttentionParams& p) {
  return static_cast<size_t>(bytes_of<SelectedWorkspace<P>>(p));
}

template <class P>
void selected_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  const auto calls = selected_calls(p, a);
  const SelectedWorkspace<P> all = SelectedWorkspace<P>::at(p, a.workspace);
  std::vector<DeltaTask<P>> deltas;
  std::vector<SelectedBackward<P>> tasks;
  for (const auto& call : calls) {
    const SelectedWorkspace<P> rows = all.from(call.first_row, p.head_dim);
    deltas.emplace_back(call.params, call.results, rows.deltas);
    tasks.emplace_back(call.params, call.results, rows);
  }
  const JointTask all_deltas(std::move(deltas));
  for_each_item(pool, all_deltas.items(), all_deltas, Items::kIndependent);
  const JointTask joint(std::move(tasks));
  for_each_item(pool, joint.items(), joint);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
