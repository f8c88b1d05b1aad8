// The pass of second derivatives, whose tiles are in second_tile.h. It serves the backward of the backward,
// the forward mode of the backward, and the backward of the forward mode. An item owns a panel of queries of
// one head, and meets all keys twice: for the numbers of its rows, then for the results. Gradients of keys
// and values gather from all panels and heads of a kv head, in that order: a panel adds to a block of keys
// after the panel before has. As in the backward (backward.h) there are no atomics on data, and the order of
// every sum depends on the shape alone.
#pragma once

#include "gradient_results.h"
#include "mask_gradient.h"
#include "second_tile.h"
#include "second_workspace.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Strips of a panel, for all of which the sums of a block of keys are loaded once.
template <class T>
constexpr int64_t kSecondStrips = limited(96 / kLanes<T>, 1, 8);

// The memory that a worker's tiles may take; tiles of further blocks are computed twice.
constexpr int64_t kKeptTileBytes = int64_t{16} << 20;

template <class P>
class BackwardBackwardTask {
  using T = Scalar<P>;

 public:
  BackwardBackwardTask(const AttentionParams& params, const BackwardBackwardArguments& arguments)
      : call_(params, arguments.tangents),
        p(params),
        a(arguments),
        workspace_(params, arguments.backward.workspace),
        chains_(p.batch * p.kv_heads),
        group_(p.heads / p.kv_heads),
        length_(divide_up(p.queries, kPanelQueries) * group_),
        blocks_(divide_up(p.keys, kKeyBlock)),
        done_(new std::atomic<int64_t>[static_cast<size_t>(chains_ * length_)]) {
    for (int64_t i = 0; i < chains_ * length_; ++i) done_[i].store(0, std::memory_order_relaxed);
  }
  int64_t items() const { return chains_ * length_; }

  struct Strip : SecondStrip<P> {
    VectorOperand<P> query_rows, tangent_rows, grad_out_rows;
    T* grad_query_t;  // [head_dim][kLanes]
    T* tangent_t;     // [value_dim][kLanes]
    T* slope_rows;    // [kLanes]
    T* visible;       // [kKeyBlock][kLanes], where it is marked
    SecondTile<T> spare;
    bool shown;  // whether the tile of this block shows anything

    static int64_t columns_size(int64_t columns) { return round_up_to_vector<T>(columns) * kLanes<T>; }
    SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
      SecondStrip<P>::allocate(p, arena);
      query_rows.allocate(p, kLanes<T>, p.head_dim, arena);
      tangent_rows.allocate(p, kLanes<T>, p.head_dim, arena);
      grad_out_rows.allocate(p, kLanes<T>, p.value_dim, arena);
      grad_query_t = arena.take<T>(columns_size(p.head_dim));
      tangent_t = arena.take<T>(columns_size(p.value_dim));
      slope_rows = arena.take<T>(kLanes<T>);
      visible = arena.take<T>(SecondTile<T>::kSize);
      spare = SecondTile<T>(p, arena.take<T>(SecondTile<T>::arrays(p) * SecondTile<T>::kSize));
    }
  };

  struct Parts {
    int64_t kept_blocks;  // blocks of a panel whose tiles are kept
    TangentKeys<P> keys;
    BlockScratch<P> tiles;     // what tiles share
    WeightOperand<P> weights;  // a tile's array as a product takes it
    Strip strips[kSecondStrips<T>];
    T* kept;
    bool* shown;  // whether kept tiles show anything

    SELFATTN_OUT_OF_LINE void allocate(const BackwardBackwardTask& t, Arena& arena) {
      const int64_t size = SecondTile<T>::arrays(t.p) * SecondTile<T>::kSize;
      const int64_t of_block = kSecondStrips<T> * Arena::bytes_for<T>(size);
      kept_blocks = smaller(t.blocks_, kKeptTileBytes / of_block);
      tiles.allocate(t.p, true, arena);
      keys.allocate(t.p, arena);
      weights.allocate(t.p, arena);
      for (Strip& strip : strips) strip.allocate(t.p, arena);
      kept = arena.take<T>(kept_blocks * kSecondStrips<T> * size);
      shown = arena.take<bool>(kept_blocks * kSecondStrips<T>);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    // All heads' first panels come first: with enough heads no item waits at all.
    const int64_t chain = item % chains_, position = item / chains_;
    Panel panel(*this, chain, position);
    begin_panel(s, panel);
    for (int64_t block = panel.first_block; block < panel.end_block; ++block) {
      load_block(s, panel, block);
      panel.finite = panel.finite && s.keys.finite(call_);
      for (int64_t i = 0; i < panel.strips; ++i) {
        const int64_t keys = seen_keys(s.strips[i], s.keys);
        const bool shown = keys > 0 && fill_tile<P>(call_, s.strips[i], s.keys, keys, s.tiles,
                                                    tile_of(s, panel, block, i), nullptr);
        if (shown) centre_tile<P>(s.strips[i], keys, tile_of(s, panel, block, i));
        if (is_kept(s, panel, block)) s.shown[kept_index(panel, block, i)] = shown;
      }
    }
    end_rows(s, panel);
    for (int64_t block = 0; block < blocks_; ++block) add_block(s, panel, block);
    for (int64_t i = 0; i < panel.strips; ++i) store_rows(s.strips[i]);
  }

 private:
  static constexpr int64_t kPanelQueries = kSecondStrips<T> * kLanes<T>;

  TangentCall call_;
  const AttentionParams& p;
  const BackwardBackwardArguments& a;
  SecondWorkspace<P> workspace_;
  int64_t chains_, group_;  // (batch, kv head)s; query heads of each
  int64_t length_;          // items of a chain: panels, and within them heads
  int64_t blocks_;
  std::unique_ptr<std::atomic<int64_t>[]> done_;  // [chains][length] blocks that an item has added to

  struct Panel {
    int64_t chain, position, batch, kv_head, head, first, end, strips = 0;
    int64_t first_block = 0, end_block = 0;  // the blocks that any strip sees
    bool finite = true;                      // no NaN and no infinity in anything that products meet

    Panel(const BackwardBackwardTask& t, int64_t chain_index, int64_t position_in_chain)
        : chain(chain_index),
          position(position_in_chain),
          batch(chain / t.p.kv_heads),
          kv_head(chain % t.p.kv_heads),
          head(kv_head * t.group_ + position % t.group_),
          first(position / t.group_ * kPanelQueries),
          end(smaller(first + kPanelQueries, t.p.queries)) {}
  };

  void begin_panel(Scratch& s, Panel& panel) const {
    KeyRange range{p.keys, 0};
    for (int64_t first = panel.first; first < panel.end; ++panel.strips) {
      Strip& strip = s.strips[panel.strips];
      const int64_t count = strip_queries<T>(first, panel.end);
      strip.begin_second(call_, a.backward, panel.batch, panel.head, first, count);
      range.begin = smaller(range.begin, strip.keys.begin);
      range.end = larger(range.end, strip.keys.end);
      strip.query_rows.load(strip.source(p, p.query, p.head_dim));
      strip.grad_out_rows.load(strip.source(p, a.backward.grad_out, p.value_dim));
      if (a.tangents.query.data != nullptr) {
        strip.tangent_rows.load(strip.source(p, a.tangents.query, p.head_dim));
      }
      panel.finite = panel.finite && strip.query_rows.finite(count, p.head_dim) &&
                     strip.grad_out_rows.finite(count, p.value_dim) &&
                     (a.tangents.query.data == nullptr || strip.tangent_rows.finite(count, p.head_dim));
      memset(strip.grad_query_t, 0, static_cast<size_t>(p.head_dim * kLanes<T>) * sizeof(T));
      memset(strip.tangent_t, 0, static_cast<size_t>(p.value_dim * kLanes<T>) * sizeof(T));
      memset(strip.slope_rows, 0, static_cast<size_t>(kLanes<T>) * sizeof(T));
      first += count;
    }
    if (range.begin < range.end) {
      panel.first_block = range.begin / kKeyBlock;
      panel.end_block = divide_up(range.end, kKeyBlock);
    }
  }

  void load_block(Scratch& s, const Panel& panel, int64_t block) const {
    const int64_t first = block * kKeyBlock;
    s.keys.load(call_, panel.batch, panel.kv_head, first, smaller(p.keys - first, kKeyBlock), Meets::kBoth,
                Meets::kBoth);
  }

  // Returns how many keys of a block a strip meets; 0 if it sees none.
  static int64_t seen_keys(const Strip& strip, const TangentKeys<P>& block) {
    if (block.first >= strip.keys.end || block.first + block.count <= strip.keys.begin) return 0;
    return smaller(strip.keys.end - block.first, block.count);
  }

  static bool is_kept(const Scratch& s, const Panel& panel, int64_t block) {
    return block - panel.first_block < s.kept_blocks;
  }
  static int64_t kept_index(const Panel& panel, int64_t block, int64_t strip) {
    return (block - panel.first_block) * kSecondStrips<T> + strip;
  }
  SecondTile<T> tile_of(Scratch& s, const Panel& panel, int64_t block, int64_t strip) const {
    if (!is_kept(s, panel, block)) return s.strips[strip].spare;
    const int64_t size = SecondTile<T>::arrays(p) * SecondTile<T>::kSize;
    return SecondTile<T>(p, s.kept + kept_index(panel, block, strip) * size);
  }

  void end_rows(Scratch& s, const Panel& panel) const {
    for (int64_t i = 0; i < panel.strips; ++i) {
      const Strip& strip = s.strips[i];
      T* sinks = static_cast<T*>(a.backward.grad_sinks_rows);
      const int64_t row = strip.row(p);
      finish_rows<P>(call_, strip, static_cast<T*>(a.tangent_lse) + row,
                     sinks != nullptr ? sinks + row : nullptr);
      const int64_t at = (panel.batch * p.heads + panel.head) * p.queries + strip.first;
      for (int64_t lane = 0; lane < strip.count; ++lane) {
        workspace_.mean[at + lane] = strip.mean[lane] + strip.origin[lane];
        workspace_.correction[at + lane] = strip.correction[lane];
      }
    }
  }

  // Adds the contributions of the panel and of a block of keys to each other's sums.
  void add_block(Scratch& s, const Panel& panel, int64_t block) const {
    const bool seen = block >= panel.first_block && block < panel.end_block;
    SecondTile<T> tiles[kSecondStrips<T>];
    if (seen) {
      load_block(s, panel, block);
      for (int64_t i = 0; i < panel.strips; ++i) {
        Strip& strip = s.strips[i];
        const int64_t keys = seen_keys(strip, s.keys);
        tiles[i] = panel.finite ? tile_of(s, panel, block, i) : strip.spare;
        if (panel.finite && is_kept(s, panel, block)) {
          strip.shown = s.shown[kept_index(panel, block, i)];
        } else {
          T* visible = panel.finite ? nullptr : strip.visible;
          strip.shown = keys > 0 && fill_tile<P>(call_, strip, s.keys, keys, s.tiles, tiles[i], visible);
          if (strip.shown) centre_tile<P>(strip, keys, tiles[i]);
        }
        if (strip.shown) add_to_rows(s, panel, strip, keys, tiles[i]);
      }
    }
    std::atomic<int64_t>* const own = &done_[panel.chain * length_ + panel.position];
    // The wait is needed even with nothing to add: the next panel relies on this one's count for all panels
    // before it.
    while (panel.position > 0 && own[-1].load(std::memory_order_acquire) <= block) std::this_thread::yield();
    add_to_keys(s, panel, block, seen, tiles);
    own->store(block + 1, std::memory_order_release);
  }

  // Adds to the gradient of queries and to tangent_out.
  void add_to_rows(Scratch& s, const Panel& panel, const Strip& strip, int64_t keys,
                   const SecondTile<T>& tile) const {
    const TangentKeys<P>& block = s.keys;
    weigh_tile<P>(p, strip, keys, tile);
    if (a.backward.grad_slopes_rows != nullptr) {
      add_slope_rows<P>(p, strip, block.first, keys, tile.values, strip.slope_rows);
    }
    if (p.softcap > 0.0) apply_second_softcap<P>(p, strip, keys, tile);
    const auto add = [&](const TangentRows<P>& rows, int64_t columns, T* weights, T* sums) {
      s.weights.block = weights;
      s.weights.ready_as_lanes(keys, strip.vecs);
      multiply_columns<P>(rows.with_weights, 0, keys, columns, s.weights, strip.count, {sums},
                          panel.finite ? nullptr : strip.visible);
    };
    add(block.keys, p.head_dim, tile.values, strip.grad_query_t);
    add(block.values, p.value_dim, tile.tangents, strip.tangent_t);
    if (a.tangents.key.data != nullptr) {
      add(block.key_tangents, p.head_dim, tile.gradients, strip.grad_query_t);
    }
    if (a.tangents.value.data != nullptr) {
      add(block.value_tangents, p.value_dim, tile.weights, strip.tangent_t);
    }
  }

  void add_to_keys(Scratch& s, const Panel& panel, int64_t block, bool seen,
                   const SecondTile<T>* tiles) const {
    const int64_t first = block * kKeyBlock, keys_of_block = smaller(p.keys - first, kKeyBlock);
    const int64_t row = panel.chain * workspace_.rows + first;
    T* const grad_key = workspace_.grad_key + row * workspace_.key_stride;
    T* const grad_value = workspace_.grad_value + row * workspace_.value_stride;
    if (panel.position == 0) {
      memset(grad_key, 0, static_cast<size_t>(keys_of_block * workspace_.key_stride) * sizeof(T));
      memset(grad_value, 0, static_cast<size_t>(keys_of_block * workspace_.value_stride) * sizeof(T));
    }
    for (int64_t i = 0; seen && i < panel.strips; ++i) {
      const Strip& strip = s.strips[i];
      if (!strip.shown) continue;
      const int64_t keys = seen_keys(strip, s.keys);
      const auto add = [&](T* weights, const VectorOperand<P>& rows, int64_t columns, T* sums) {
        s.weights.block = weights;
        s.weights.ready_as_rows(keys, 0, strip.count, keys);
        multiply_weights<P>(s.weights, keys, 0, strip.count, rows, columns, sums,
                            panel.finite ? nullptr : strip.visible);
      };
      add(tiles[i].values, strip.query_rows, p.head_dim, grad_key);
      if (a.tangents.query.data != nullptr) {
        add(tiles[i].gradients, strip.tangent_rows, p.head_dim, grad_key);
      }
      add(tiles[i].tangents, strip.grad_out_rows, p.value_dim, grad_value);
    }
    if (panel.position < length_ - 1) return;
    store_sums<T>(a.backward.grad_key, p.dtype, panel.batch, panel.kv_head, first, keys_of_block, p.head_dim,
                  {grad_key, workspace_.key_stride}, static_cast<T>(p.scale));
    store_sums<T>(a.backward.grad_value, p.dtype, panel.batch, panel.kv_head, first, keys_of_block,
                  p.value_dim, {grad_value, workspace_.value_stride}, T(1));
  }

  void store_rows(const Strip& strip) const {
    T factors[kLanes<T>];
    const auto store = [&](const View& view, int64_t columns, const T* sums, T factor) {
      std::fill(factors, factors + kLanes<T>, factor);
      store_transposed<T>(element(view.data, p.dtype, view.offset(strip.batch, strip.head, strip.first)),
                          p.dtype, view.stride[2], strip.count, columns, sums, kLanes<T>, factors);
    };
    store(a.backward.grad_query, p.head_dim, strip.grad_query_t, static_cast<T>(p.scale));
    store(a.tangent_out, p.value_dim, strip.tangent_t, T(1));
    if (a.backward.grad_slopes_rows == nullptr) return;
    memcpy(static_cast<T*>(a.backward.grad_slopes_rows) + strip.row(p), strip.slope_rows,
           static_cast<size_t>(strip.count) * sizeof(T));
  }
};

// Computes dS2 for the gradient of the mask, from the rows' numbers in the workspace.
template <class P>
struct SecondScoreGradient {
  using T = Scalar<P>;
  using Arguments = BackwardBackwardArguments;
  static const View& grad_mask(const Arguments& a) { return a.backward.grad_mask; }

  SecondStrip<P> strip;
  TangentKeys<P> keys;
  BlockScratch<P> tiles;
  SecondTile<T> tile;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    tiles.allocate(p, true, arena);
    strip.allocate(p, arena);
    keys.allocate(p, arena);
    tile = SecondTile<T>(p, arena.take<T>(SecondTile<T>::arrays(p) * SecondTile<T>::kSize));
  }
  void begin(const AttentionParams& p, const Arguments& a, int64_t batch, int64_t head, int64_t first,
             int64_t count) {
    const TangentCall call(p, a.tangents);
    const SecondWorkspace<P> workspace(p, a.backward.workspace);
    strip.begin_second(call, a.backward, batch, head, first, count);
    const int64_t row = (batch * p.heads + head) * p.queries + first;
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      strip.origin[lane] = lane < count ? workspace.mean[row + lane] : T(0);
      strip.correction[lane] = lane < count ? workspace.correction[row + lane] : T(0);
      strip.mean[lane] = T(0);
    }
  }
  T* of_block(const AttentionParams& p, const Arguments& a, int64_t key, int64_t count) {
    const TangentCall call(p, a.tangents);
    keys.load(call, strip.batch, p.kv_head(strip.head), key, count, Meets::kLanes, Meets::kLanes);
    if (!fill_tile<P>(call, strip, keys, count, tiles, tile, nullptr)) return nullptr;
    centre_tile<P>(strip, count, tile);
    weigh_tile<P>(p, strip, count, tile);
    return tile.values;
  }
};

template <class P>
void backward_backward_pass(const AttentionParams& p, const BackwardBackwardArguments& a,
                            const ThreadPool& pool) {
  const bool has_mask = a.backward.grad_mask.data != nullptr;
  if (!p.sequences.any()) {
    const BackwardBackwardTask<P> task(p, a);
    for_each_item(pool, task.items(), task);
    if (has_mask) mask_gradient<P, SecondScoreGradient<P>>(p, a, pool);
    return;
  }
  auto calls = element_calls(p, a, 0, kAnyQueries);
  char* workspace = static_cast<char*>(a.backward.workspace);
  for (auto& call : calls) {
    call.results.backward.workspace = workspace;
    workspace += SecondWorkspace<P>(call.params).bytes();
  }
  const auto joint = joint_task<BackwardBackwardTask<P>>(calls);
  for_each_item(pool, joint.items(), joint);
  if (has_mask) mask_gradient<P, SecondScoreGradient<P>>(p, a, calls, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
