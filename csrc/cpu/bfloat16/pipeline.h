// The forward where nothing comes between scores and softmax, as a pipeline of blocks of keys: tiles multiply
// while vectors compute. While the weights of a block are made from its scores, the engine multiplies the
// weights of the block before with the values, and queries with the keys of the block to come. Instructions
// of both kinds alternate: a processor looks a few hundred of them ahead, so that neither kind waits for the
// other. docs/cpu-kernels.md, "The pipeline of tiles", has the cycles.
//
// A block has 128 keys, four groups of 32. The scores of a group are one product of the engine, as are 32
// columns of the output with a block. In the first half of a block vectors weigh groups 0 and 1, of which the
// scores are there; the engine updates half of the output of the block before, and computes the scores of
// groups 2 and 3 in the places of 0 and 1. In the second half it updates the rest, and computes groups 0 and
// 1 of the next block, which may be that of another strip: only the first block of all and the last have
// nothing beside them.
#pragma once

#include "pipeline_weigher.h"

#include "../algorithm/forward_strip.h"
#include "products_of_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kGroupKeys = 32;
constexpr int64_t kPipelineKeys = 4 * kGroupKeys;

// The keys of a strip that go through the pipeline, as rows of the operands. What is left at the end is less
// than a block.
struct PipelinedKeys {
  ForwardStrip<Pairs>* strip;
  int64_t from, end;

  bool has_block() const { return end - from >= kPipelineKeys; }
};

// kScoreOrder: PairProduct::order of the scores.
template <int kPieces, int kScoreOrder>
class ForwardPipeline {
 public:
  ForwardPipeline(const AttentionParams& p, ForwardScratch<Pairs>& scratch)
      : keys_(scratch.keys),
        values_(scratch.values),
        scores_(scratch.weights.block),
        weights_(scratch.weights.pipeline),
        sums_(reinterpret_cast<float*>(weights_ + 2 * kBlockPairs)),
        score_steps_(product_pairs(p.head_dim) / 16),
        value_panels_(p.value_dim / 32) {}

  // Takes whole blocks off the keys of strips that all have one, and returns `end`; or sooner, the strip with
  // a block in which the maximum of some row has to move or is too large, which is still there.
  PipelinedKeys* run(PipelinedKeys* strips, const PipelinedKeys* end) {
    if constexpr (kPieces > 1) {
      return run_beside<1>(strips, end);  // more products, and more work in a step
    } else {
      const int64_t steps = 2 * score_steps_ + 4 * (value_panels_ / 2);  // of half a block
      if (steps >= 16) return run_beside<2>(strips, end);
      return steps >= 8 ? run_beside<4>(strips, end) : run_beside<8>(strips, end);
    }
  }

 private:
  using Weigher = PipelineWeigher<kPieces>;
  using Panel = PairEngine::Panel;
  static constexpr int64_t kLd = kLanes<Pairs>;
  static constexpr int64_t kBlockPairs = kPipelineKeys / 2 * kPieces * kLd;
  // A sum of one piece goes on in its tiles; those of several are added to the output after each block.
  static constexpr bool kInPlace = kPieces == 1;

  // A block, the `number`th of all.
  struct Place {
    ForwardStrip<Pairs>* strip;
    int64_t from, number;

    explicit operator bool() const { return strip != nullptr; }
  };

  template <int kBeside>
  __attribute__((noinline)) PipelinedKeys* run_beside(PipelinedKeys* keys, const PipelinedKeys* end) {
    NoWork none;
    Weigher work;
    unstored_ = {};  // tiles hold whatever was multiplied since the last run
    Place before{}, here{keys->strip, keys->from, 0};
    score<0>(here, 0, none);
    score<0>(here, 1, none);
    while (here) {
      if (before.strip != here.strip) {
        store();
        if (!take_shifts(*here.strip, work)) break;
      }
      const bool last_of_strip = keys->end - here.from < 2 * kPipelineKeys;
      Place next{here.strip, here.from + kPipelineKeys, here.number + 1};
      if (last_of_strip) next = keys + 1 == end ? Place{} : Place{keys[1].strip, keys[1].from, next.number};
      weigh_beside<kBeside>(before, here, next, work);
      if (!work.add_sums(*here.strip)) return keys;
      keys->from += kPipelineKeys;
      if (last_of_strip) ++keys;
      before = here;
      here = next;
    }
    if (before) {
      output<0>(before, 0, value_panels_, none);
      store();
      add_output(before);
    }
    return keys;
  }

  template <int kBeside>
  SELFATTN_INLINE void weigh_beside(const Place& before, const Place& here, const Place& next,
                                    Weigher& work) {
    const int64_t middle = value_panels_ / 2;
    work.clear();
    work.begin(scores_, 2 * kGroupKeys, weights_of(here));
    if (before) output<kBeside>(before, 0, middle, work);
    two_scores<kBeside>(here, 2, work);
    work.finish();
    work.begin(scores_, 2 * kGroupKeys, work.pairs);
    if (before) output<kBeside>(before, middle, value_panels_, work);
    if (next) {
      two_scores<kBeside>(next, 0, work);
    } else {
      store();
    }
    work.finish();
    if (before) add_output(before);
  }

  // The tiles of a product are stored during the next one: before that, what stood there must be weighed.
  template <int kBeside, class Work>
  SELFATTN_INLINE void two_scores(const Place& place, int64_t group, Work& work) {
    score<kBeside>(place, group, work);
    work.leave(kGroupKeys);
    score<kBeside>(place, group + 1, work);
  }
  template <int kBeside, class Work>
  SELFATTN_INLINE void score(const Place& place, int64_t group, Work& work) {
    const LaneOperand<Pairs>& query = place.strip->query;
    Panel panel;
    panel.a = keys_.data + (place.from + group * kGroupKeys) * keys_.row_stride;
    panel.a_row = keys_.row_stride;
    panel.a_piece = keys_.piece_stride;
    panel.a_step = panel.a_turn = 16;
    panel.b = query.data;
    panel.b_row = kLd;
    panel.b_piece = query.piece_stride;
    panel.c = {scores_ + group % 2 * kGroupKeys * kLd, kLd};
    panel.steps = score_steps_;
    PairEngine::multiply_beside<kPieces, kScoreOrder, kBeside, false>(panel, unstored_, work);
  }
  // Panels of 32 columns of the output.
  template <int kBeside, class Work>
  SELFATTN_INLINE void output(const Place& place, int64_t begin, int64_t end, Work& work) {
    Panel panel;
    panel.a_row = values_.row_stride;
    panel.a_piece = values_.piece_stride;
    panel.a_step = 16;
    panel.a_turn = values_.block_stride - 16;
    panel.b = weights_of(place);
    panel.b_row = kPieces * kLd;
    panel.b_piece = kLd;
    panel.steps = kPipelineKeys / 32;
    const uint32_t* block = values_.data + place.from / kKeyBlock * values_.block_stride;
    float* sums = kInPlace ? place.strip->out_t : sums_;
    for (int64_t i = begin; i < end; ++i) {
      panel.a = block + i * 32 * values_.row_stride;
      panel.c = {sums + i * 32 * kLd, kLd};
      PairEngine::multiply_beside<kPieces, kPieces, kBeside, kInPlace>(panel, unstored_, work);
    }
  }
  void store() { PairEngine::store_panel(unstored_); }

  void add_output(const Place& place) const {
    if constexpr (!kInPlace) {
      for (int64_t i = 0; i < value_panels_ * 32 * kLd; i += 16) {
        float* to = place.strip->out_t + i;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(sums_ + i)));
      }
    }
  }

  // Lanes that have no maximum yet get that of the scores of groups 0 and 1. Returns false where one is
  // larger than a weigher takes.
  SELFATTN_INLINE bool take_shifts(const ForwardStrip<Pairs>& strip, Weigher& work) const {
    const __m512 scale = _mm512_set1_ps(strip.rest_of_scale);
    const __m512 first = shift_of(strip, 0), second = shift_of(strip, 16);
    if (Weigher::is_large(first) || Weigher::is_large(second)) return false;
    work.template take_shift<0>(first, scale);
    work.template take_shift<1>(second, scale);
    return true;
  }
  __m512 shift_of(const ForwardStrip<Pairs>& strip, int64_t lane) const {
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 max = _mm512_loadu_ps(strip.row_max + lane);
    const __mmask16 none = _mm512_cmp_ps_mask(max, nothing, _CMP_EQ_OQ);
    if (none != 0) {
      const __m512 most = _mm512_mul_ps(most_of_lanes<Pairs>(2 * kGroupKeys, scores_ + lane),
                                        _mm512_set1_ps(strip.rest_of_scale));
      max = _mm512_mask_blend_ps(none, max, most);
      _mm512_storeu_ps(strip.row_max + lane, max);
    }
    const __mmask16 hidden = _mm512_cmp_ps_mask(max, nothing, _CMP_EQ_OQ);
    return _mm512_mask_blend_ps(hidden, max, _mm512_setzero_ps());
  }

  uint32_t* weights_of(const Place& place) const { return weights_ + place.number % 2 * kBlockPairs; }

  const RowOperand<Pairs>& keys_;
  const ColumnOperand<Pairs>& values_;
  float* const scores_;      // [2 groups][32 keys][kLd]
  uint32_t* const weights_;  // [2 blocks][64 pairs of keys][kPieces][kLd]
  float* const sums_;        // of several pieces [value_dim][kLd]
  const int64_t score_steps_, value_panels_;
  PairEngine::Sums unstored_;  // where the tiles of the last product belong
};

// The keys of a strip that all its queries see and that need nothing but scores, softmax and output, if they
// make a block, among the `loaded` keys that the operands hold from key `first` on. None where a row must not
// depend on its neighbours: weights are rounded in another way here, for as many keys as all of them see.
inline PipelinedKeys pipelined_keys(const AttentionParams& p, ForwardStrip<Pairs>& strip, int64_t first,
                                    int64_t loaded, const ForwardScratch<Pairs>& scratch) {
  const PipelinedKeys none{&strip, 0, 0};
  if (strip.vecs != 2 || p.value_dim % 32 != 0 || p.mask.data != nullptr || p.softcap > 0.0 ||
      p.alibi_slopes.data != nullptr || p.dropout.enabled || p.batch_invariant) {
    return none;
  }
  const int64_t last = strip.first + strip.count - 1;
  const int64_t from = larger(round_up(visible_keys(p, last, last).begin, kKeyBlock) - first, 0);
  const int64_t end = smaller(visible_keys(p, strip.first, strip.first).end - first, loaded);
  if (end - from < kPipelineKeys || scratch.values.special(from, end - from)) return none;
  // As scores, a single piece holds every number.
  if (scratch.weights.pieces > 1 && (strip.query.special || scratch.keys.special(from, end - from)))
    return none;
  return {&strip, from, end};
}

// Where a maximum has to move, a block of keys goes as it would without a pipeline.
template <int kPieces, int kScoreOrder>
void run_pipeline(const AttentionParams& p, PipelinedKeys* strips, int64_t count, int64_t first,
                  ForwardScratch<Pairs>& scratch) {
  ForwardPipeline<kPieces, kScoreOrder> pipeline(p, scratch);
  PipelinedKeys* const end = strips + count;
  while ((strips = pipeline.run(strips, end)) != end) {
    forward_block<Pairs>(p, *strips->strip, first + strips->from, kKeyBlock, strips->from, scratch, false);
    strips->from += kKeyBlock;
    if (!strips->has_block()) ++strips;
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
    const PipelinedKeys keys = pipelined_keys(p, strips[i], first, loaded, scratch);
    KeyRange plain = loaded_keys_of(strips[i], first, loaded);
    if (keys.has_block()) {
      plain.end = first + keys.from;
      pipelined[some++] = keys;
    }
    forward_blocks<Pairs>(p, strips[i], plain, first, scratch, leave_hidden_out);
  }
  if (some == 0) return;
  switch (scratch.weights.pieces) {
    case 1:
      run_pipeline<1, 1>(p, pipelined, some, first, scratch);
      break;
    case 2:
      scratch.keys.order == 3 ? run_pipeline<2, 3>(p, pipelined, some, first, scratch)
                              : run_pipeline<2, 2>(p, pipelined, some, first, scratch);
      break;
    default:
      run_pipeline<3, 3>(p, pipelined, some, first, scratch);
  }
  for (int64_t i = 0; i < some; ++i) {
    const KeyRange all = loaded_keys_of(*pipelined[i].strip, first, loaded);
    forward_blocks<Pairs>(p, *pipelined[i].strip, {first + pipelined[i].from, all.end}, first, scratch,
                          leave_hidden_out);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
