// Scores of the pipeline (pipeline.h) that a product alone does not make. They need work between product and
// weighing if not every query of a strip sees a key, or if a row has no pieces. All of it is float arithmetic
// on scores in memory, only for those halves of a block that need it.
#pragma once

#include "products_of_pairs.h"

#include "../fused/forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kGroupKeys = 32;
constexpr int64_t kHalfKeys = 2 * kGroupKeys;
constexpr int64_t kPipelineKeys = 2 * kHalfKeys;

// The keys of a strip that go through the pipeline, as rows of the operands, which begin with key `first`.
struct PipelinedKeys {
  ForwardStrip<Pairs>* strip;
  int64_t first;
  int64_t from, end;
  KeyRange seen_by_all;

  bool any() const { return from < end; }

  // The end of the block that holds row `row`. Blocks end at multiples of kPipelineKeys, counted from key 0:
  // which keys are loaded together depends on the strips of an item, and results must not.
  int64_t end_of_block(int64_t row) const {
    return smaller(((first + row) / kPipelineKeys + 1) * kPipelineKeys - first, end);
  }
};

// A block; `number` counts all blocks.
struct PipelinePlace {
  PipelinedKeys* keys;
  int64_t from, end, number;

  explicit operator bool() const { return keys != nullptr; }
  ForwardStrip<Pairs>& strip() const { return *keys->strip; }
  int64_t groups() const { return divide_up(end - from, kGroupKeys); }
  int64_t halves() const { return divide_up(end - from, kHalfKeys); }
  int64_t groups_of_half(int64_t half) const { return smaller(groups() - 2 * half, 2); }

  // The next block of the same strip or the first one of the strip after it; none after the last strip.
  PipelinePlace next(const PipelinedKeys* last) const {
    PipelinedKeys* to = end < keys->end ? keys : keys + 1;
    if (to == last) return {};
    const int64_t begin = to == keys ? end : to->from;
    return {to, begin, to->end_of_block(begin), number + 1};
  }
};

// The lanes of a strip that see a key, one bit each.
inline uint32_t lanes_that_see(const AttentionParams& p, const ForwardStrip<Pairs>& strip, int64_t key) {
  const QueryRange queries = visible_queries(p, key, key);
  const int64_t begin = limited(queries.begin - strip.first, 0, kLanes<Pairs>);
  const int64_t end = limited(queries.end - strip.first, 0, kLanes<Pairs>);
  return elements_below(end) & ~elements_below(begin);
}

// The work on a half of a block besides its product.
class HalfBlock {
 public:
  SELFATTN_INLINE HalfBlock(const AttentionParams& p, const PipelinePlace& place, int64_t half,
                            const RowOperand<Pairs>& rows)
      : p_(p),
        keys_(*place.keys),
        rows_(rows),
        from_(place.from + half * kHalfKeys),
        count_(place.groups_of_half(half) * kGroupKeys),
        real_(smaller(place.end - from_, kHalfKeys)) {}

  int64_t rows() const { return count_; }
  bool is_finished() const { return !is_altered() && !has_hidden() && !has_special(); }

  // scores: [rows()][kLanes]; the values of a mask are in scratch.mask.
  __attribute__((noinline)) void finish(const BlockScratch<Pairs>& scratch, float* scores) const {
    if (has_special()) {
      replace_special_scores(rows_, from_, real_, keys_.strip->query, p_.head_dim, keys_.strip->count,
                             scores);
    }
    if (is_altered()) {
      multiply(finish_scores<Pairs>(p_, *keys_.strip, keys_.first + from_, real_, scratch, scores), scores);
      hide(real_, scores);
    } else {
      hide(0, scores);
    }
  }

 private:
  // Either all scores of a call are multiplied by the rest of the scale, or none of them.
  bool is_altered() const {
    const QueryStrip<Pairs>& strip = *keys_.strip;
    return (alters_scores(p_) && strip.rest_of_scale != 1.0f) ||
           alters_scores_of(p_, strip, keys_.first + from_, real_);
  }
  bool has_hidden() const {
    return from_ < keys_.seen_by_all.begin || from_ + count_ > keys_.seen_by_all.end;
  }
  // For scores, a single piece holds every number, NaN and Inf included.
  bool has_special() const {
    return rows_.pieces > 1 && (keys_.strip->query.special || rows_.special(from_, real_));
  }
  void multiply(float factor, float* scores) const {
    if (factor == 1.0f) return;
    for (int64_t i = 0; i < real_ * kLanes<Pairs>; i += 16) {
      _mm512_storeu_ps(scores + i, _mm512_mul_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(factor)));
    }
  }
  // Hides keys by position, from `row` on.
  void hide(int64_t row, float* scores) const {
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (; row < count_; ++row) {
      const int64_t key = keys_.first + from_ + row;
      const uint32_t seen = row < real_ ? lanes_that_see(p_, *keys_.strip, key) : 0;
      if (seen == ~uint32_t{0}) continue;
      // Whole vectors are stored: they can be read before they have reached the cache.
      for (int64_t lane = 0; lane < kLanes<Pairs>; lane += 16) {
        float* at = scores + row * kLanes<Pairs> + lane;
        const auto lanes = static_cast<__mmask16>(seen >> lane);
        _mm512_storeu_ps(at, _mm512_mask_blend_ps(lanes, hidden, _mm512_loadu_ps(at)));
      }
    }
  }

  const AttentionParams& p_;
  const PipelinedKeys& keys_;
  const RowOperand<Pairs>& rows_;
  int64_t from_, count_, real_;  // the first row of the operand, rows in whole groups, and rows that are keys
};

// Takes halves that a map or mask hides off the next blocks, and loads the mask of the block that is left as
// [half][kHalfKeys][kLanes].
inline void load_visible_masks(const AttentionParams& p, PipelinePlace& place, const PipelinedKeys* last,
                               float* masks) {
  if (p.mask.data == nullptr && p.function.map.blocks == nullptr) return;
  const int64_t number = place.number;
  while (place) {
    const int64_t first = place.keys->first;
    const auto loads = [&](int64_t half) {
      const int64_t from = place.from + half * kHalfKeys, keys = smaller(place.end - from, kHalfKeys);
      return shows_block(p, place.strip(), first + from, keys, masks + half * kHalfKeys * kLanes<Pairs>);
    };
    if (loads(0)) {
      if (place.halves() == 2 && !loads(1)) place.end = place.from + kHalfKeys;
      return;
    }
    if (place.halves() == 1) {
      place = place.next(last);
      place.number = number;
    } else {
      place.from += kHalfKeys;
    }
  }
}

// Adds special rows of a block's values to the output, since products took zeros in their place. `pairs`
// holds the weights of the block, [pair of keys][piece][kLanes]; for masks see load_visible_masks.
inline void add_special_values(const AttentionParams& p, const PipelinePlace& place,
                               const ColumnOperand<Pairs>& values, const uint32_t* pairs,
                               const float* masks) {
  constexpr int64_t ld = kLanes<Pairs>;
  const SpecialRows& s = values.specials;
  for (int64_t begin = place.from; begin < place.end; begin += kKeyBlock) {
    int64_t count = 0;
    for (int64_t row = begin; row < smaller(begin + kKeyBlock, place.end); ++row) {
      if (!s.marks[row]) continue;
      s.convert(row, count);
      const int64_t key = row - place.from;
      const uint32_t seen = lanes_that_see(p, place.strip(), place.keys->first + row);
      for (int64_t lane = 0; lane < ld; lane += 16) {
        __m512 weight = _mm512_setzero_ps();
        for (int piece = 0; piece < values.pieces; ++piece) {
          const __m512i both = _mm512_loadu_si512(pairs + (key / 2 * values.pieces + piece) * ld + lane);
          weight = _mm512_add_ps(weight, key % 2 == 0 ? first_of_pairs(both) : second_of_pairs(both));
        }
        auto lanes = static_cast<__mmask16>(seen >> lane);
        if (p.mask.data != nullptr) {
          const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
          lanes &= _mm512_cmp_ps_mask(_mm512_loadu_ps(masks + key * ld + lane), hidden, _CMP_NEQ_UQ);
        }
        _mm512_storeu_ps(s.weights + count * ld + lane, weight);
        _mm512_storeu_ps(s.visible + count * ld + lane, _mm512_maskz_mov_ps(lanes, _mm512_set1_ps(1.0f)));
      }
      ++count;
    }
    multiply_visible<float, true>({count, s.values, round_up_to_vector<float>(p.value_dim), s.weights, ld,
                                   place.strip().out_t, ld, Update::kAdd, nullptr},
                                  p.value_dim, place.strip().vecs, s.visible, ld);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
