// The step that both forwards of selected keys are made of: a strip of queries meets a tile of keys.
#pragma once

#include "../fused/overflow.h"
#include "lists.h"
#include "tile.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The memory of a worker beside its strips.
template <class P>
struct SelectedScratch : ForwardScratch<P> {
  Scalar<P>* factors;                        // [kKeyBlock][kLanes] of dropout
  char *query_rows, *key_rows, *value_rows;  // gathered rows, which operands may use where they lie
  bool leave_hidden_out;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    ForwardScratch<P>::allocate(p, arena);
    factors = arena.take<Scalar<P>>(p.dropout.enabled ? kKeyBlock * kLanes<P> : 0);
    query_rows = arena.take<char>(copied_bytes<P>(p, kLanes<P>, p.head_dim));
    key_rows = arena.take<char>(copied_bytes<P>(p, kKeyBlock, p.head_dim));
    value_rows = arena.take<char>(copied_bytes<P>(p, kKeyBlock, p.value_dim));
  }

  void load(const AttentionParams& p, int64_t batch, int64_t kv_head, const TileKeys& tile) {
    this->keys.load(gathered<P>(p, batch, kv_head, tile, p.key, p.head_dim, key_rows));
    this->values.load(gathered<P>(p, batch, kv_head, tile, p.value, p.value_dim, value_rows));
  }
};

// A strip meets the keys of a tile, which are rows `from` and on of the operands in the scratch.
template <class P>
void forward_tile(const AttentionParams& p, ForwardStrip<P>& strip, const TileRows<P>& rows,
                  const TileKeys& keys, int64_t from, SelectedScratch<P>& scratch) {
  using T = Scalar<P>;
  const Shown shown = load_bias<P>(p, rows, keys, scratch.block.mask);
  if (shown == Shown::kNothing) return;
  WeightOperand<P>& weights = scratch.weights;
  const T factor =
      tile_scores<P>(p, strip, scratch.keys, from, keys.count, shown, scratch.block, weights.block);
  const bool mark = scratch.leave_hidden_out || scratch.values.special(from, keys.count);
  if (mark) mark_visible<P>(strip, keys.count, weights.block, scratch.visible);
  const auto drop = [&](T kept, T* block) {
    tile_dropout<P>(p.dropout, rows, keys, kept, scratch.factors);
    multiply_tile_by<P>(keys.count, strip.vecs, scratch.factors, block);
  };
  const bool in_place = weights.sums_in_place();
  if (weigh_block<P>(p, strip, keys.count, factor, weights, mark, drop)) strip.rescale_out(p);
  const ColumnSums<T> out{strip.out_t, in_place ? Update::kAdd : Update::kScaleAdd, strip.rescale};
  multiply_strip_columns<P>(strip, scratch.values, from, keys.count, p.value_dim, weights, out,
                            mark ? scratch.visible : nullptr);
}

// Calls visit(keys) for the tiles of the keys in a range that a list of selected blocks holds, in order.
// Tiles have `most` keys, the last one fewer. Afterwards the list begins with the blocks that may have later
// keys.
template <class Visit>
void for_each_tile(const AttentionParams& p, SelectedList& list, KeyRange range, int64_t most,
                   const Visit& visit) {
  const int64_t size = p.selection.key_size;
  if (range.begin >= range.end) return;
  list.skip_below(range.begin / size);
  TileKeys keys;
  if (size == 1) {  // the list holds the keys themselves
    for (int64_t left = list.count_below(range.end); left > 0; left -= keys.count) {
      keys.count = smaller(most, left);
      for (int64_t i = 0; i < keys.count; ++i) keys.key[i] = list.next[i];
      list.next += keys.count;
      visit(keys);
    }
    return;
  }
  const int32_t* const end_of_blocks = list.next + list.count_below(divide_up(range.end, size));
  for (const int32_t* block = list.next; block != end_of_blocks; ++block) {
    const int64_t end = smaller((*block + int64_t{1}) * size, range.end);
    for (int64_t key = larger(*block * size, range.begin); key < end; ++key) {
      keys.key[keys.count++] = key;
      if (keys.count < most) continue;
      visit(keys);
      keys.count = 0;
    }
  }
  if (keys.count > 0) visit(keys);
  list.skip_below(range.end / size);
}

inline SelectedList list_of(const AttentionParams& p, int64_t batch, int64_t head, int64_t query) {
  const int32_t* const first = p.selection.row(batch, head, query / p.selection.query_size);
  return {first, first + p.selection.longest};
}

// Computes the elements that are not finite in a query's output once more, from the statistics of its row,
// as mend_overflow does, and for its reason. It is rare, so it allocates its own memory.
template <class T>
SELFATTN_OUT_OF_LINE void mend_selected(const AttentionParams& p, const ForwardOutputs& outputs,
                                        int64_t batch, int64_t head, int64_t query) {
  Arena arena(bytes_of<SelectedScratch<T>>(p) + bytes_of<ForwardStrip<T>>(p));
  SelectedScratch<T> scratch;
  ForwardStrip<T> strip;
  scratch.allocate(p, arena);
  strip.allocate(p, arena);
  TileRows<T> rows;
  rows.begin(batch, p.kv_head(head));
  rows.add(head, query);
  strip.begin(p, gathered<T>(p, rows, p.query, p.head_dim, scratch.query_rows), false);
  strip.batch = batch;
  strip.head = head;
  strip.reset(p);
  const int64_t row = rows.row(p, 0);
  const T most = static_cast<const T*>(outputs.row_max)[row];
  const T sum = static_cast<const T*>(outputs.row_sum)[row];
  for (int64_t lane = 0; lane < Simd<T>::kWidth; ++lane) {
    strip.row_max[lane] = most == -std::numeric_limits<T>::infinity() ? T(0) : most;
    scratch.scale[lane] = sum == T(0) ? T(0) : T(1) / sum;
  }
  T* const weights = scratch.weights.block;
  SelectedList list = list_of(p, batch, head, query);
  for_each_tile(p, list, visible_keys(p, query, query), kKeyBlock, [&](const TileKeys& keys) {
    const Shown shown = load_bias<T>(p, rows, keys, scratch.block.mask);
    if (shown == Shown::kNothing) return;
    scratch.load(p, batch, rows.kv_head, keys);
    const T factor = tile_scores<T>(p, strip, scratch.keys, 0, keys.count, shown, scratch.block, weights);
    mark_visible<T>(strip, keys.count, weights, scratch.visible);
    normalise_block<T>(p, strip, keys.count, strip.row_max, scratch.scale, factor, true, weights);
    if (p.dropout.enabled) {
      tile_dropout<T>(p.dropout, rows, keys, keep_scale<T>(p.dropout), scratch.factors);
      multiply_tile_by<T>(keys.count, strip.vecs, scratch.factors, weights);
    }
    multiply_columns<T>(scratch.values, 0, keys.count, p.value_dim, scratch.weights, strip.count,
                        {strip.out_t}, scratch.visible);
  });
  replace_not_finite(p, outputs, outputs.out.offset(batch, head, query), strip.out_t);
}

// Writes a query's results: its statistics, and its sums times `factor`.
template <class T>
void store_selected(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch, int64_t head,
                    int64_t query, T row_max, T row_sum, T factor, const T* sums) {
  using S = Simd<T>;
  const int64_t row = p.row(batch, head, query), at = outputs.out.offset(batch, head, query);
  static_cast<T*>(outputs.row_max)[row] = row_max;
  static_cast<T*>(outputs.row_sum)[row] = row_sum;
  for (int64_t e = 0; e < p.value_dim; e += S::kWidth) {
    store_with_residual<T>(outputs.out.data, outputs.out_residual, p.dtype, at + e,
                           smaller(p.value_dim - e, S::kWidth), S::mul(S::load(sums + e), S::set(factor)));
  }
  if (!all_finite(sums, 0, 1, p.value_dim)) mend_selected<T>(p, outputs, batch, head, query);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
