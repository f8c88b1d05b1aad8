// The backward as a pipeline of blocks of keys, where tiles multiply while vectors compute. It runs where
// nothing comes between scores, softmax and dS; pipeline.h is its counterpart of the forward.
// docs/cpu-pairs.md, "The pipeline of the backward", gives the reasons.
//
// A cell is a strip of queries and a block of 64 keys, in two groups of 32 keys. While vectors make weights
// and dS of a group from its scores and dP, the engine computes scores and dP of the next group, half of what
// the cell before adds to dQ, and a share of what the strips of the block before add to dK and dV. Cells go
// on from strip to strip and from block to block: only the first group has nothing before it, and only the
// last cell and the last block's dK and dV have no vector work beside them.
//
// With one piece, sums go on in tiles. With several, vectors weigh a group beside scores and dP, which take
// as long, and add the products' own sums to dQ, dK and dV beside those products.
#pragma once

#include "gradient_weigher.h"

#include "../fused/gradient_panel.h"

namespace selfattn::cpu::SELFATTN_ISA {

// kScoreOrder: PairProduct::order of scores and dP. kBeside: steps of the weigher for every four products of
// tiles. With one piece, products for dK and dV have one step: they are as many as all others, and fewer
// steps are left by then.
template <int kPieces, int kScoreOrder, bool kScaled, int kBeside>
class GradientPipeline {
 public:
  GradientPipeline(const AttentionParams& p, const GradientPanel<Pairs>& panel, const PanelBlocks& blocks,
                   GradientScratch<Pairs>& scratch)
      : p_(p),
        panel_(panel),
        blocks_(blocks),
        scratch_(scratch),
        score_steps_(product_pairs(p.head_dim) / 16),
        grad_steps_(product_pairs(p.value_dim) / 16),
        head_panels_(padded_rows(p.head_dim) / 32),
        value_panels_(padded_rows(p.value_dim) / 32) {}

  __attribute__((noinline)) void run() {
    NoWork none;
    Weigher work;
    constexpr int64_t kSecondRows = kPieces > 1 ? kPieces * kRowPiece : 0;  // one piece has no sums
    float* const places = reinterpret_cast<float*>(scratch_.weights.pipeline + kSecondRows);
    SumsBeside sums(places, places + SumsBeside::kSize);
    Cell before{-1, 0, 0}, here{0, blocks_.blocks[0].first, 0};
    scores_and_gradients<0>(here, 0, none);
    store();
    while (here.block < blocks_.count) {
      const Cell next = next_of(here);
      work.take_strip(strip_of(here));
      for (int64_t group = 0; group < 2; ++group) {
        weigh_group(before, here, group, group == 0 ? here : next, work, sums);
      }
      before = here;
      here = next;
    }
    if constexpr (kPieces == 1) {
      add_queries<0>(before, 0, head_panels_, none, sums);
      add_keys<0>(before.block, 0, key_panels(), none, sums);
    } else {
      add_queries<kSumsBeside>(before, 0, head_panels_, sums, sums);
      add_keys<kSumsBeside>(before.block, 0, key_panels(), sums, sums);
    }
    store();
    if constexpr (kPieces > 1) sums.flush();
  }

 private:
  using Weigher = GradientWeigher<kPieces, kScaled>;
  using Panel = PairEngine::Panel;
  static constexpr int64_t kLd = kLanes<Pairs>;
  static constexpr int64_t kGroupKeys = kKeyBlock / 2;
  static constexpr int64_t kRow = Weigher::kRow, kRowPiece = Weigher::kRowPiece;
  static constexpr int kSumsBeside = PairEngine::kSumsBeside<kPieces>;
  static_assert(kPieces * kRowPiece + (kPieces > 1 ? 2 * SumsBeside::kSize : 0) <=
                    4 * kPieces * WeightOperand<Pairs>::kLanePieces,
                "WeightOperand::pipeline has room for the rows of a second block, and for sums");

  // A block and a strip; `number` counts all cells.
  struct Cell {
    int64_t block, strip, number;
  };
  Cell next_of(const Cell& c) const {
    if (c.strip + 1 < blocks_.blocks[c.block].end) return {c.block, c.strip + 1, c.number + 1};
    const int64_t block = c.block + 1;
    return {block, block < blocks_.count ? blocks_.blocks[block].first : 0, c.number + 1};
  }
  GradientStrip<Pairs>& strip_of(const Cell& c) const { return panel_.strips[c.strip]; }
  int64_t from(int64_t block) const { return blocks_.blocks[block].from; }
  int64_t first_key(const Cell& c, int64_t group) const {
    return panel_.first_key + from(c.block) + group * kGroupKeys;
  }

  // Makes weights and dS of a group of `here`, whose scores and dP are there. Beside that run scores and dP
  // of the next group, which belongs to the cell `next`, and products with what was weighed before.
  SELFATTN_INLINE void weigh_group(const Cell& before, const Cell& here, int64_t group, const Cell& next,
                                   Weigher& work, SumsBeside& sums) {
    if (hides(here, group)) hide(here, group);
    const int64_t row = group * kGroupKeys, queries = here.strip * (kLd / 2);
    work.begin(scores_of(group), gradients_of(group), kGroupKeys,
               {weight_rows(here.block) + row * kRow + queries, grad_rows(here.block) + row * kRow + queries,
                grad_lanes(here) + row / 2 * kPieces * kLd});
    const bool is_last = next.block >= blocks_.count;
    if (!is_last) scores_and_gradients<kBeside>(next, 1 - group, work);
    if constexpr (kPieces == 1) {
      add_before<kBeside, 1>(before, here, group, work, sums);
    } else if (is_last) {
      add_before<1, 1>(before, here, group, work, sums);
    } else {
      add_before<kSumsBeside, kSumsBeside>(before, here, group, sums, sums);
    }
    if (unstored_.data == gradients_of(1 - group)) store();  // no product has followed dP of the next group
    work.finish();
  }
  template <int kBesideQueries, int kBesideKeys, class Work>
  SELFATTN_INLINE void add_before(const Cell& before, const Cell& here, int64_t group, Work& work,
                                  SumsBeside& sums) {
    if (before.block >= 0) {
      const int64_t middle = head_panels_ / 2;
      add_queries<kBesideQueries>(before, group == 0 ? 0 : middle, group == 0 ? middle : head_panels_, work,
                                  sums);
    }
    if (here.block > 0) {
      const PanelBlock& block = blocks_.blocks[here.block];
      const int64_t shares = 2 * (block.end - block.first), share = 2 * (here.strip - block.first) + group;
      add_keys<kBesideKeys>(here.block - 1, key_panels() * share / shares,
                            key_panels() * (share + 1) / shares, work, sums);
    }
  }

  // The tiles of a product are stored during the next one.
  template <int kWork, class Work>
  SELFATTN_INLINE void scores_and_gradients(const Cell& c, int64_t group, Work& work) {
    const GradientStrip<Pairs>& strip = strip_of(c);
    const int64_t row = from(c.block) + group * kGroupKeys;
    for (int i = 0; i < 2; ++i) {  // one call for both, since the weigher's steps are long
      const bool scores = i == 0;
      multiply_lanes<kWork>(scores ? *panel_.key_rows : *panel_.value_rows, row,
                            scores ? strip.query : strip.grad_out, scores ? score_steps_ : grad_steps_,
                            scores ? scores_of(group) : gradients_of(group), work);
    }
  }
  template <int kWork, class Work>
  SELFATTN_INLINE void multiply_lanes(const RowOperand<Pairs>& rows, int64_t row,
                                      const LaneOperand<Pairs>& lanes, int64_t steps, float* c, Work& work) {
    Panel panel;
    panel.a = rows.data + row * rows.row_stride;
    panel.a_row = rows.row_stride;
    panel.a_second = 16 * rows.row_stride;
    panel.a_piece = rows.piece_stride;
    panel.a_step = panel.a_turn = 16;
    panel.b = lanes.data;
    panel.b_row = kLd;
    panel.b_piece = lanes.piece_stride;
    panel.c = {c, kLd};
    panel.steps = steps;
    PairEngine::multiply_beside<kPieces, kScoreOrder, kWork, false>(panel, unstored_, work);
  }
  // Adds a product to panel.c.
  template <int kWork, class Work>
  SELFATTN_INLINE void add(Panel& panel, Work& work, SumsBeside& sums) {
    if constexpr (kPieces == 1) {
      PairEngine::multiply_beside<1, 1, kWork, true>(panel, unstored_, work);
    } else {
      PairEngine::add_beside<kPieces, kPieces, kWork>(panel, sums, unstored_, work);
    }
  }

  // Adds a cell's part of dQ^T, in panels of 32 columns of dQ.
  template <int kWork, class Work>
  SELFATTN_INLINE void add_queries(const Cell& c, int64_t begin, int64_t end, Work& work, SumsBeside& sums) {
    const ColumnOperand<Pairs>& keys = *panel_.key_columns;
    Panel panel;
    panel.a_row = keys.row_stride;
    panel.a_second = 16 * keys.row_stride;
    panel.a_piece = keys.piece_stride;
    panel.a_step = panel.a_turn = 16;
    panel.b = grad_lanes(c);
    panel.b_row = kPieces * kLd;
    panel.b_piece = kLd;
    panel.steps = kKeyBlock / 32;
    for (int64_t i = begin; i < end; ++i) {
      panel.a = keys.data + from(c.block) / kKeyBlock * keys.block_stride + i * 32 * keys.row_stride;
      panel.c = {panel_.grad_query_t[c.strip] + i * 32 * kLd, kLd};
      add<kWork>(panel, work, sums);
    }
  }

  // Adds the part of the strips of a block in dV and dK: panels of 32 keys and 32 columns, those of dV first.
  int64_t key_panels() const { return kKeyBlock / 32 * (value_panels_ + head_panels_); }
  template <int kWork, class Work>
  SELFATTN_INLINE void add_keys(int64_t number, int64_t begin, int64_t end, Work& work, SumsBeside& sums) {
    const PanelBlock& block = blocks_.blocks[number];
    const int64_t of_values = kKeyBlock / 32 * value_panels_;
    Panel panel;
    panel.a_row = kRow;
    panel.a_second = 16 * kRow;
    panel.a_piece = kRowPiece;
    panel.a_step = panel.a_turn = 16;
    panel.steps = block.end - block.first;
    for (int64_t i = begin; i < end; ++i) {
      const bool value = i < of_values;
      const VectorOperand<Pairs>& rows = value ? *panel_.grad_out_rows : *panel_.query_rows;
      float* const to = value ? panel_.grad_value : panel_.grad_key;
      const int64_t stride = value ? panel_.value_stride : panel_.head_stride;
      const int64_t at = value ? i : i - of_values, panels = value ? value_panels_ : head_panels_;
      const int64_t row = at / panels * 32, column = at % panels * 32;
      panel.a = (value ? weight_rows(number) : grad_rows(number)) + row * kRow + block.first * (kLd / 2);
      panel.b = rows.data + block.first * (kLd / 2) * rows.pair_stride + column;
      panel.b_row = rows.pair_stride;
      panel.b_piece = rows.piece_stride;
      panel.c = {to + (block.from + row) * stride + column, stride};
      add<kWork>(panel, work, sums);
    }
  }
  void store() { PairEngine::store_panel(unstored_); }

  // Whether some query of the cell does not see all keys of a group, or there are fewer queries than lanes.
  SELFATTN_INLINE bool hides(const Cell& c, int64_t group) const {
    const GradientStrip<Pairs>& strip = strip_of(c);
    const int64_t key = first_key(c, group), last = strip.first + kLd - 1;
    return strip.count < kLd || visible_keys(p_, last, last).begin > key ||
           visible_keys(p_, strip.first, strip.first).end < key + kGroupKeys;
  }
  // Sets scores of hidden keys to -inf.
  __attribute__((noinline)) void hide(const Cell& c, int64_t group) const {
    const GradientStrip<Pairs>& strip = strip_of(c);
    const bool windowed = window_of_block<Pairs>(p_, strip, first_key(c, group), kGroupKeys, scratch_.block);
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t lane = 0; lane < kLd; lane += 16) {
      const __mmask16 valid = lanes_below(strip.count - lane);
      __m512 first = _mm512_setzero_ps(), end = _mm512_set1_ps(static_cast<float>(kGroupKeys));
      if (windowed) {
        first = _mm512_loadu_ps(scratch_.block.first_key + lane);
        end = _mm512_loadu_ps(scratch_.block.end_key + lane);
      }
      float* to = scores_of(group) + lane;
      for (int64_t j = 0; j < kGroupKeys; ++j, to += kLd) {
        const __m512 index = _mm512_set1_ps(static_cast<float>(j));
        const __mmask16 from_first = _mm512_mask_cmp_ps_mask(valid, first, index, _CMP_LE_OQ);
        const __mmask16 shown = _mm512_mask_cmp_ps_mask(from_first, index, end, _CMP_LT_OQ);
        _mm512_storeu_ps(to, _mm512_mask_blend_ps(shown, hidden, _mm512_loadu_ps(to)));
      }
    }
  }

  // The scratch of the block's operands holds scores and dP in two groups of 32 keys each, and everything in
  // pairs twice, so that a block or cell can be multiplied while the next one is weighed.
  float* scores_of(int64_t group) const { return scratch_.weights.block + group * kGroupKeys * kLd; }
  float* gradients_of(int64_t group) const { return scratch_.grad.block + group * kGroupKeys * kLd; }
  uint32_t* weight_rows(int64_t block) const {
    return block % 2 == 0 ? scratch_.weights.rows : scratch_.weights.pipeline;
  }
  uint32_t* grad_rows(int64_t block) const {
    return block % 2 == 0 ? scratch_.grad.rows : scratch_.grad.pipeline;
  }
  uint32_t* grad_lanes(const Cell& c) const {
    return c.number % 2 == 0 ? scratch_.grad.lanes : scratch_.weights.lanes;
  }

  const AttentionParams& p_;
  const GradientPanel<Pairs>& panel_;
  const PanelBlocks& blocks_;
  GradientScratch<Pairs>& scratch_;
  const int64_t score_steps_, grad_steps_;  // of 32 columns
  const int64_t head_panels_, value_panels_;
  TileSums unstored_;  // where the tiles of the last product belong
};

template <>
inline bool adds_blocks<Pairs>(const AttentionParams& p) {
  return p.mask.data == nullptr && p.alibi_slopes.data == nullptr && p.value_dim > 0 &&
         padded_rows(p.head_dim) % 32 == 0 && padded_rows(p.value_dim) % 32 == 0;
}

template <>
inline void add_blocks<Pairs>(const AttentionParams& p, const GradientPanel<Pairs>& panel,
                              const PanelBlocks& blocks, GradientScratch<Pairs>& scratch) {
  const int pieces = Pairs::pieces(p);
  const int64_t dims = padded_depth(p.head_dim) + padded_depth(p.value_dim);
  if (pieces == 3) {
    GradientPipeline<3, 3, true, 1>(p, panel, blocks, scratch).run();
  } else if (pieces == 2 && Pairs::order_of_scores(p) == 3) {
    GradientPipeline<2, 3, true, 1>(p, panel, blocks, scratch).run();
  } else if (pieces == 2 && dims < 192) {  // at most twelve times four products of tiles for 16 steps
    GradientPipeline<2, 2, true, 2>(p, panel, blocks, scratch).run();
  } else if (pieces == 2) {
    GradientPipeline<2, 2, true, 1>(p, panel, blocks, scratch).run();
  } else if (dims >= 192) {  // dims of 64 have ten times four products of tiles for 16 steps
    GradientPipeline<1, 1, true, 1>(p, panel, blocks, scratch).run();
  } else if (panel.strips[blocks.blocks[0].first].rest_of_scale == 1.0f) {
    GradientPipeline<1, 1, false, 2>(p, panel, blocks, scratch).run();
  } else {
    GradientPipeline<1, 1, true, 2>(p, panel, blocks, scratch).run();
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
