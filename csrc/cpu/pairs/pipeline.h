// The forward as a pipeline of blocks of keys, where tiles multiply while vectors compute. While the weights
// of a block are made from its scores, the engine multiplies the weights of the block before by the values,
// and the queries by the keys of the next block. Instructions of both kinds alternate: a processor looks a
// few hundred of them ahead, so neither kind waits for the other. docs/cpu-pairs.md, "The pipeline of
// tiles", has the cycles.
//
// A block has 128 keys, four groups of 32; the first and the last block of a strip may have fewer. The scores
// of a group are one product of the engine, and so are 32 columns of the output with a block. In the first
// half of a block, vectors weigh groups 0 and 1, whose scores are there; the engine updates half of the
// output of the block before, and computes the scores of groups 2 and 3 in the places of 0 and 1. In the
// second half it updates the rest, and computes groups 0 and 1 of the next block, which may be that of
// another strip. So only the first block of all and the last have nothing beside them.
#pragma once

#include "pipeline_scores.h"
#include "pipeline_weigher.h"

namespace selfattn::cpu::SELFATTN_ISA {

// kScoreOrder: PairProduct::order of the scores.
template <int kPieces, int kScoreOrder>
class ForwardPipeline {
 public:
  ForwardPipeline(const AttentionParams& p, ForwardScratch<Pairs>& scratch)
      : p_(p),
        keys_(scratch.keys),
        values_(scratch.values),
        scores_(scratch.weights.block),
        weights_(scratch.weights.pipeline),
        sums_(reinterpret_cast<float*>(weights_ + 2 * kBlockPairs)),
        masks_(scratch.weights.masks),
        block_(scratch.block),
        score_steps_(product_pairs(p.head_dim) / 16),
        value_panels_(p.value_dim / 32) {}

  // Computes the blocks of `strips`, which all have keys, takes them off, and returns `end`. It returns
  // sooner at a block in which the maximum of some row had to move (moved()) or is too large: then it returns
  // the strip of that block, which is still there.
  PipelinedKeys* run(PipelinedKeys* strips, PipelinedKeys* end) {
    moved_ = false;
    if constexpr (kPieces > 1) {
      return run_beside<1>(strips, end);  // more products, and more work in a step
    } else {
      const int64_t steps = 2 * score_steps_ + 4 * (value_panels_ / 2);  // of half a block
      if (steps >= 16) return run_beside<2>(strips, end);
      return steps >= 8 ? run_beside<4>(strips, end) : run_beside<8>(strips, end);
    }
  }

  bool moved() const { return moved_; }

 private:
  using Weigher = PipelineWeigher<kPieces>;
  using Panel = PairEngine::Panel;
  using Place = PipelinePlace;
  static constexpr int64_t kLd = kLanes<Pairs>;
  static constexpr int64_t kBlockPairs = kPipelineKeys / 2 * kPieces * kLd;
  // With one piece, the output is summed in its tiles; with several, sums are added to it after each block.
  static constexpr bool kInPlace = kPieces == 1;

  template <int kBeside>
  __attribute__((noinline)) PipelinedKeys* run_beside(PipelinedKeys* keys, PipelinedKeys* end) {
    NoWork none;
    Weigher work;
    unstored_ = {};  // tiles hold what was multiplied since the last run
    Place before{}, here{keys, keys->from, keys->end_of_block(keys->from), 0};
    load_visible_masks(p_, here, end, masks_of(here));
    if (here) two_scores<0>(here, 0, none);
    while (here) {
      here.keys->from = here.from;
      if (before.keys != here.keys) has_shifts_ = false;
      if (!make_ready(here, 0, work)) break;
      Place next = here.next(end);
      load_visible_masks(p_, next, end, masks_of(next));
      const bool ready = weigh_beside<kBeside>(before, here, next, work);
      const uint32_t higher = ready ? work.lanes_too_high() : 0;
      if (higher != 0) move_maxima(here, higher);
      if (!ready || higher != 0) return here.keys;
      work.add_sums(here.strip());
      if (values_.special(here.from, here.end - here.from)) {
        add_special_values(p_, here, values_, weights_of(here), masks_of(here));
      }
      here.keys->from = here.end;
      before = here;
      here = next;
    }
    if (before) {
      output<0>(before, 0, value_panels_, none);
      store();
      add_output(before);
    }
    return here ? here.keys : end;
  }

  template <int kBeside>
  SELFATTN_INLINE bool weigh_beside(const Place& before, const Place& here, const Place& next,
                                    Weigher& work) {
    const int64_t halves = here.halves();
    bool ready = true;
    work.clear();
    work.pairs = weights_of(here);
    for (int64_t half = 0, panel = 0; half < halves; ++half) {
      const bool is_last = half + 1 == halves;
      if (half > 0) ready = make_ready(here, half, work);
      work.begin(scores_, here.groups_of_half(half) * kGroupKeys, work.pairs);
      const int64_t panels = is_last ? value_panels_ : value_panels_ / 2;
      if (before) output<kBeside>(before, panel, panels, work);
      panel = panels;
      if (!is_last) {
        two_scores<kBeside>(here, half + 1, work);
      } else if (next) {
        two_scores<kBeside>(next, 0, work);
      } else {
        store();
      }
      work.finish();
    }
    if (before) add_output(before);
    return ready;
  }

  // Finishes the scores of a half before they are weighed. The first of two groups is in memory, and the
  // second gets there before the weigher reaches it; a single group is still in tiles. Returns false if a
  // maximum is larger than a weigher takes.
  SELFATTN_INLINE bool make_ready(const Place& place, int64_t half, Weigher& work) {
    const HalfBlock scores(p_, place, half, keys_);
    const bool finished = scores.is_finished();
    if (finished && has_shifts_ && scores.rows() == kHalfKeys) return true;
    store();
    if (!finished) {
      block_.mask = masks_of(place) + half * kHalfKeys * kLd;
      scores.finish(block_, scores_);
    }
    return has_shifts_ || take_shifts(place.strip(), scores.rows(), work);
  }

  // The tiles of a product are stored during the next one, so what stands in their place must be weighed
  // before.
  template <int kBeside, class Work>
  SELFATTN_INLINE void two_scores(const Place& place, int64_t half, Work& work) {
    score<kBeside>(place, half, 0, work);
    if (place.groups_of_half(half) == 1) return;
    work.reach(scores_ + kGroupKeys * kLd);
    score<kBeside>(place, half, 1, work);
  }
  template <int kBeside, class Work>
  SELFATTN_INLINE void score(const Place& place, int64_t half, int64_t group, Work& work) {
    const LaneOperand<Pairs>& query = place.strip().query;
    const int64_t row = place.from + half * kHalfKeys + group * kGroupKeys;
    Panel panel;
    panel.a = keys_.data + row * keys_.row_stride;
    panel.a_row = keys_.row_stride;
    panel.a_piece = keys_.piece_stride;
    // The operand has whole tiles of rows. If there is no second tile, the first is used once more, and
    // hidden.
    panel.a_second = row + 16 < place.keys->end ? 16 * keys_.row_stride : 0;
    panel.a_step = panel.a_turn = 16;
    panel.b = query.data;
    panel.b_row = kLd;
    panel.b_piece = query.piece_stride;
    panel.c = {scores_ + group * kGroupKeys * kLd, kLd};
    panel.steps = score_steps_;
    PairEngine::multiply_beside<kPieces, kScoreOrder, kBeside, false>(panel, unstored_, work);
  }
  // Adds panels of 32 columns of the output.
  template <int kBeside, class Work>
  SELFATTN_INLINE void output(const Place& place, int64_t begin, int64_t end, Work& work) {
    Panel panel;
    panel.a_row = values_.row_stride;
    panel.a_piece = values_.piece_stride;
    panel.a_second = 16 * values_.row_stride;
    panel.a_step = 16;
    panel.a_turn = values_.block_stride - 16;
    panel.b = weights_of(place);
    panel.b_row = kPieces * kLd;
    panel.b_piece = kLd;
    panel.steps = place.groups();
    const uint32_t* block = values_.data + place.from / kKeyBlock * values_.block_stride;
    float* sums = kInPlace ? place.strip().out_t : sums_;
    for (int64_t i = begin; i < end; ++i) {
      panel.a = block + i * 32 * values_.row_stride;
      panel.c = {sums + i * 32 * kLd, kLd};
      PairEngine::multiply_beside<kPieces, kPieces, kBeside, kInPlace>(panel, unstored_, work);
    }
  }
  // After this, the memory that tiles were stored to may change.
  void store() { PairEngine::store_panel(unstored_); }

  void add_output(const Place& place) const {
    if constexpr (!kInPlace) {
      for (int64_t i = 0; i < value_panels_ * 32 * kLd; i += 16) {
        float* to = place.strip().out_t + i;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(sums_ + i)));
      }
    }
  }

  // Lanes that have no maximum yet get that of the scores in memory. Returns false if one is larger than a
  // weigher takes.
  SELFATTN_INLINE bool take_shifts(const ForwardStrip<Pairs>& strip, int64_t keys, Weigher& work) {
    const __m512 scale = scale_of(strip);
    has_shifts_ = true;
    const __m512 first = shift_of(strip, keys, 0), second = shift_of(strip, keys, 16);
    if (Weigher::is_large(first) || Weigher::is_large(second)) return false;
    work.template take_shift<0>(first, scale);
    work.template take_shift<1>(second, scale);
    return true;
  }
  __m512 shift_of(const ForwardStrip<Pairs>& strip, int64_t keys, int64_t lane) {
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 max = _mm512_loadu_ps(strip.row_max + lane);
    const __mmask16 none = _mm512_cmp_ps_mask(max, nothing, _CMP_EQ_OQ);
    if (none != 0) {
      const __m512 most = _mm512_mul_ps(most_of_lanes<Pairs>(keys, scores_ + lane), scale_of(strip));
      max = _mm512_mask_blend_ps(none, max, most);
      _mm512_storeu_ps(strip.row_max + lane, max);
    }
    const __mmask16 hidden = _mm512_cmp_ps_mask(max, nothing, _CMP_EQ_OQ);
    if (hidden != 0) has_shifts_ = false;
    return _mm512_mask_blend_ps(hidden, max, _mm512_setzero_ps());
  }

  // Moves the maxima of some lanes of a strip to the scores of a block; other lanes stay as they are.
  __attribute__((noinline)) void move_maxima(const Place& place, uint32_t lanes) {
    ForwardStrip<Pairs>& strip = place.strip();
    __m512 most[2] = {_mm512_loadu_ps(strip.row_max), _mm512_loadu_ps(strip.row_max + 16)};
    for (int64_t from = place.from; from < place.end; from += kKeyBlock) {
      const int64_t keys = smaller(place.end - from, kKeyBlock);
      float factor;
      block_.mask = masks_;
      if (!score_block<Pairs>(p_, strip, place.keys->first + from, keys, keys_, from, block_, scores_,
                              &factor)) {
        continue;
      }
      for (int i = 0; i < 2; ++i) {
        const __m512 scores = most_of_lanes<Pairs>(keys, scores_ + 16 * i);
        most[i] = _mm512_max_ps(_mm512_mul_ps(scores, _mm512_set1_ps(factor)), most[i]);
      }
    }
    for (int64_t lane = 0; lane < strip.vecs * 16; lane += 16) {
      const auto moving = static_cast<__mmask16>(lanes >> lane);
      const auto multiply = [&](float* to, __m512 factor) {
        _mm512_storeu_ps(to + lane, _mm512_mul_ps(_mm512_loadu_ps(to + lane), factor));
      };
      const __m512 old = _mm512_loadu_ps(strip.row_max + lane), now = most[lane / 16];
      const __m512 rescale = exp_nonpositive<float>(_mm512_sub_ps(old, now));
      const __m512 factor = _mm512_mask_blend_ps(moving, _mm512_set1_ps(1.0f), rescale);
      _mm512_storeu_ps(strip.row_max + lane, _mm512_mask_blend_ps(moving, old, now));
      _mm512_storeu_ps(strip.rescale + lane, factor);
      multiply(strip.row_sum, factor);
      multiply(strip.used_sum, factor);
    }
    strip.rescale_out(p_);
    moved_ = true;
  }

  // The factor that scores in memory still lack.
  __m512 scale_of(const ForwardStrip<Pairs>& strip) const {
    return _mm512_set1_ps(alters_scores(p_) ? 1.0f : strip.rest_of_scale);
  }

  float* masks_of(const Place& place) const { return masks_ + place.number % 2 * kPipelineKeys * kLd; }
  uint32_t* weights_of(const Place& place) const { return weights_ + place.number % 2 * kBlockPairs; }

  const AttentionParams& p_;
  const RowOperand<Pairs>& keys_;
  const ColumnOperand<Pairs>& values_;
  float* const scores_;      // [2 groups][32 keys][kLd]
  uint32_t* const weights_;  // [2 blocks][64 pairs of keys][kPieces][kLd]
  float* const sums_;        // with several pieces: [value_dim][kLd]
  float* const masks_;       // [2 blocks][2 halves][kHalfKeys][kLd]
  BlockScratch<Pairs> block_;
  const int64_t score_steps_, value_panels_;
  TileSums unstored_;  // where the tiles of the last product belong
  bool has_shifts_{};  // each lane of the strip has a maximum
  bool moved_{};
};

// Returns those keys of a strip that go through the pipeline, among the `loaded` ones that the operands hold
// from key `first` on. There are none if a row must not depend on its neighbours (batch_invariant) or has
// statistics, nor if special rows of values meet a score function: the pipeline knows only what masks and
// positions hide.
inline PipelinedKeys pipelined_keys(const AttentionParams& p, ForwardStrip<Pairs>& strip, int64_t first,
                                    int64_t loaded, const ColumnOperand<Pairs>& values) {
  const KeyRange keys = loaded_keys_of(strip, first, loaded);
  const bool in_panels = p.value_dim > 0 && p.value_dim % 32 == 0;
  if (strip.vecs != 2 || !in_panels || p.dropout.enabled || p.batch_invariant || strip.has_statistics ||
      (p.function.any() && keys.begin < keys.end &&
       values.special(keys.begin - first, keys.end - keys.begin))) {
    return {&strip, first, 0, 0, {0, 0}};
  }
  // Windows move with the query: the last query's begins latest, and the first query's ends earliest.
  const int64_t last = strip.first + strip.count - 1;
  const int64_t seen_from = visible_keys(p, last, last).begin;
  const int64_t seen_end = smaller(visible_keys(p, strip.first, strip.first).end, keys.end);
  return {&strip, first, keys.begin - first, keys.end - first, {seen_from - first, seen_end - first}};
}

// Runs the pipeline. A block of keys whose maximum is too large is computed as it would be without one.
template <int kPieces, int kScoreOrder>
void run_pipeline(const AttentionParams& p, PipelinedKeys* strips, int64_t count,
                  ForwardScratch<Pairs>& scratch) {
  ForwardPipeline<kPieces, kScoreOrder> pipeline(p, scratch);
  PipelinedKeys* const end = strips + count;
  while ((strips = pipeline.run(strips, end)) != end) {
    if (pipeline.moved()) continue;
    const int64_t keys = smaller(strips->end - strips->from, kKeyBlock);
    forward_block<Pairs>(p, *strips->strip, strips->first + strips->from, keys, strips->from, scratch, false);
    strips->from += keys;
    if (!strips->any()) ++strips;
    if (strips == end) return;
  }
}

template <>
inline void forward_loaded<Pairs>(const AttentionParams& p, ForwardStrip<Pairs>* strips, int64_t count,
                                  int64_t first, int64_t loaded, ForwardScratch<Pairs>& scratch,
                                  bool leave_hidden_out) {
  PipelinedKeys pipelined[kMostStrips<Pairs>];
  int64_t some = 0;
  for (int64_t i = 0; i < count; ++i) {
    const PipelinedKeys keys = pipelined_keys(p, strips[i], first, loaded, scratch.values);
    if (keys.any()) {
      pipelined[some++] = keys;
    } else {
      forward_blocks<Pairs>(p, strips[i], loaded_keys_of(strips[i], first, loaded), first, scratch,
                            leave_hidden_out);
    }
  }
  if (some == 0) return;
  switch (scratch.weights.pieces) {
    case 1:
      return run_pipeline<1, 1>(p, pipelined, some, scratch);
    case 2:
      return scratch.keys.order == 3 ? run_pipeline<2, 3>(p, pipelined, some, scratch)
                                     : run_pipeline<2, 2>(p, pipelined, some, scratch);
    default:
      return run_pipeline<3, 3>(p, pipelined, some, scratch);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
