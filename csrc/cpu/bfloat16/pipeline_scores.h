// Scores of the pipeline (pipeline.h) between their product and their weighing, where a product alone does
// not make them: keys that not every query of a strip sees, rows of which products cannot be in pieces. All
// of it is plain arithmetic on scores in memory, for those halves of a block alone that need it.
#pragma once

#include "products_of_pairs.h"

#include "../algorithm/forward_strip.h"

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

  // Where the block ends that holds row `row`. Blocks end at multiples of kPipelineKeys, counted from key 0:
  // which keys are loaded together depends on the strips of an item, and results must not.
  int64_t end_of_block(int64_t row) const {
    return smaller(((first + row) / kPipelineKeys + 1) * kPipelineKeys - first, end);
  }
};

// A block, the `number`th of all.
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

// One bit per lane.
inline uint32_t lanes_that_see(const AttentionParams& p, const ForwardStrip<Pairs>& strip, int64_t key) {
  const QueryRange queries = visible_queries(p, key, key);
  const int64_t begin = limited(queries.begin - strip.first, 0, kLanes<Pairs>);
  const int64_t end = limited(queries.end - strip.first, 0, kLanes<Pairs>);
  return elements_below(end) & ~elements_below(begin);
}

// What a half of a block needs besides its product.
class HalfBlock {
 public:
  SELFATTN_INLINE HalfBlock(const PipelinePlace& place, int64_t half, const RowOperand<Pairs>& rows)
      : keys_(*place.keys),
        rows_(rows),
        from_(place.from + half * kHalfKeys),
        count_(place.groups_of_half(half) * kGroupKeys),
        real_(smaller(place.end - from_, kHalfKeys)) {}

  int64_t rows() const { return count_; }
  bool has_hidden() const {
    return from_ < keys_.seen_by_all.begin || from_ + count_ > keys_.seen_by_all.end;
  }
  // As scores, a single piece holds every number.
  bool has_special() const {
    return rows_.pieces > 1 && (keys_.strip->query.special || rows_.special(from_, real_));
  }

  // scores: [rows()][kLanes]
  __attribute__((noinline)) void finish(const AttentionParams& p, float* scores) const {
    if (has_special()) {
      replace_special_scores(rows_, from_, real_, keys_.strip->query, p.head_dim, keys_.strip->vecs, scores);
    }
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t row = 0; row < count_; ++row, scores += kLanes<Pairs>) {
      const int64_t key = keys_.first + from_ + row;
      const uint32_t seen = row < real_ ? lanes_that_see(p, *keys_.strip, key) : 0;
      if (seen == ~uint32_t{0}) continue;
      // Whole vectors, which can be read before they have reached the cache.
      const auto first = static_cast<__mmask16>(seen), second = static_cast<__mmask16>(seen >> 16);
      _mm512_storeu_ps(scores, _mm512_mask_blend_ps(first, hidden, _mm512_loadu_ps(scores)));
      _mm512_storeu_ps(scores + 16, _mm512_mask_blend_ps(second, hidden, _mm512_loadu_ps(scores + 16)));
    }
  }

 private:
  const PipelinedKeys& keys_;
  const RowOperand<Pairs>& rows_;
  int64_t from_, count_, real_;  // rows of the operand, whole groups of them, and those that are keys
};

// Adds special rows of the values of a block to the output: products took zeros in their place. `pairs`: the
// weights of the block, [pair of keys][piece][kLanes].
inline void add_special_values(const AttentionParams& p, const PipelinePlace& place,
                               const ColumnOperand<Pairs>& values, const uint32_t* pairs) {
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
        const auto lanes = static_cast<__mmask16>(seen >> lane);
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
