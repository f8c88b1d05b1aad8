// A block of final scores: dot products, softcap, ALiBi, mask, windows and score function.
#pragma once

#include "../products/elementary.h"
#include "../products/tile_multiply.h"
#include "dropout.h"
#include "mask_block.h"
#include "query_tail.h"
#include "function_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
T head_scalar(const HeadScalars& scalars, int64_t batch, int64_t head) {
  return static_cast<const T*>(scalars.data)[batch * scalars.batch_stride + head * scalars.head_stride];
}

// Returns the distances of neighbouring queries from a key, if lane 0 stands `first` keys after it. Each far
// distance is rounded once, so that it does not depend on the strip's first query.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec distances(int64_t first, typename Simd<T>::Vec lanes) {
  using S = Simd<T>;
  constexpr int64_t kExact = (int64_t{1} << std::numeric_limits<T>::digits) - S::kWidth;
  if (first > -kExact && first < kExact) return S::abs(S::add(S::set(static_cast<T>(first)), lanes));
  T far[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) far[i] = static_cast<T>(first + i);
  return S::abs(S::load(far));
}

// Computes s[j][lane] = scale * <query, row from + j of keys>, leading dimension kLanes; the scale is left
// out if it is not part of Q^T. Every pass gets its scores here, in one order of summation: the backward's
// exp(s - row_max) is exact where it matters only if s is the forward's to the last bit.
template <class P>
void dot_block(QueryStrip<P>& strip, const RowOperand<P>& keys, int64_t from, int64_t count, int64_t head_dim,
               Scalar<P>* s) {
  if constexpr (kDirect<P>) {
    if (strip.few_queries) {
      return few_query_score_block<P>(strip.query.data, strip.count, keys.rows.data + from * keys.rows.stride,
                                      keys.rows.stride, count, head_dim, s, kLanes<P>);
    }
  }
  multiply_strip<P>(strip, keys, from, count, strip.query, strip.tail, head_dim, s);
}

// These tell whether scores are more than products times the scale, apart from windows: by options other than
// functions, and by any option.
inline bool has_other_options(const AttentionParams& p) {
  return p.mask.data != nullptr || p.softcap > 0.0 || p.alibi_slopes.data != nullptr;
}
inline bool alters_scores(const AttentionParams& p) { return has_other_options(p) || p.function.any(); }

// Tells the same of keys key .. key + keys - 1 of a strip, whose scores the function may leave as they are.
template <class P>
bool alters_scores_of(const AttentionParams& p, const QueryStrip<P>& strip, int64_t key, int64_t keys) {
  return has_other_options(p) || (p.function.any() && alters_block(p.function, strip, key, keys));
}

// The steps that scores take in one loop, in this order.
struct ScoreSteps {
  bool scaled, capped, sloped, masked, windowed;
};

template <class P>
void take_score_steps(const AttentionParams& p, const ScoreSteps& steps, const QueryStrip<P>& strip,
                      int64_t key, int64_t keys, const BlockScratch<P>& scratch, Scalar<P>* s) {
  using T = Scalar<P>;
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<P>;
  T lane_index[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) lane_index[i] = static_cast<T>(i);
  const int64_t corner = strip.first + p.query_offset - key;
  for (int64_t lane = 0; lane < strip.count; lane += S::kWidth) {
    with_vectors_of<P>(strip.count - lane, [&](auto vectors) {
      using V = decltype(vectors);
      const auto& [scaled, capped, sloped, masked, windowed] = steps;
      const auto scale = V::set(strip.rest_of_scale);
      const auto hidden = V::set(-std::numeric_limits<T>::infinity());
      const auto cap = V::set(static_cast<T>(p.softcap));
      const auto inverse_cap = V::set(static_cast<T>(capped ? 1.0 / p.softcap : 0.0));
      const auto slope = V::set(sloped ? head_scalar<T>(p.alibi_slopes, strip.batch, strip.head) : T(0));
      const auto lanes = S::load(lane_index);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = j * ld + lane;
        auto x = V::load(s + at);
        if (scaled) x = V::mul(x, scale);
        if (capped) {
          const auto t = tanh<T>(V::mul(x, inverse_cap));
          if (scratch.capped != nullptr) V::store(scratch.capped + at, t);
          x = V::mul(cap, t);
        }
        if (sloped) x = V::sub(x, V::mul(slope, distances<T>(corner + lane - j, lanes)));
        if (masked) {
          const auto bias = V::load(scratch.mask + at);
          x = V::select(V::equal(bias, hidden), hidden, V::add(x, bias));
        }
        if (windowed) {
          const auto index = V::set(static_cast<T>(j));
          const auto before = V::less(index, V::load(scratch.first_key + lane));
          const auto inside = V::less(index, V::load(scratch.end_key + lane));
          x = V::select(inside, V::select(before, hidden, x), hidden);
        }
        V::store(s + at, x);
      }
    });
  }
}

// Finishes what dot_block computed for keys key .. key + keys - 1: the scores become final up to the softmax,
// -inf where hidden. A mask's block is in scratch.mask. Returns the factor that is still missing: the softmax
// of pairs applies it on its way.
template <class P>
Scalar<P> finish_scores(const AttentionParams& p, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                        const BlockScratch<P>& scratch, Scalar<P>* s) {
  using T = Scalar<P>;
  const bool windowed = window_of_block(p, strip, key, keys, scratch);
  const bool altered = scratch.given != nullptr || alters_scores_of(p, strip, key, keys);
  const bool scaled = strip.rest_of_scale != T(1);
  if (!windowed && !altered && !(kDirect<P> && scaled)) return strip.rest_of_scale;
  const bool capped = p.softcap > 0.0, sloped = p.alibi_slopes.data != nullptr;
  const bool masked = p.mask.data != nullptr;
  const auto take = [&](const ScoreSteps& steps) {
    take_score_steps(p, steps, strip, key, keys, scratch, s);
  };
  if (!p.function.any()) {
    take({scaled, capped, sloped, masked, windowed});
    return T(1);
  }
  if (scaled || capped || sloped) take({scaled, capped, sloped, false, false});
  if (scratch.given != nullptr) memcpy(scratch.given, s, static_cast<size_t>(keys * kLanes<P>) * sizeof(T));
  const bool beside = apply_function(p.function, strip, key, keys, s);
  if (masked || windowed) take({false, false, false, masked, windowed});
  if (beside) note_beside(p.function, strip, keys, s);
  return T(1);
}

// Tells whether map and mask show anything of a block. Loads the mask's block.
template <class P>
bool shows_block(const AttentionParams& p, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                 Scalar<P>* mask) {
  if (p.function.map.blocks != nullptr && !map_shows_block(p.function, strip, key, keys)) return false;
  return p.mask.data == nullptr || load_mask_block(p, strip, key, keys, mask);
}

// Computes the scores of keys key .. key + keys - 1, which are the rows of key_rows from `from` on:
// s[j][lane], leading dimension kLanes. Returns false, with s untouched, if the map of blocks or the mask
// hides all of them. `factor` gets what finish_scores returns.
template <class P>
bool score_block(const AttentionParams& p, QueryStrip<P>& strip, int64_t key, int64_t keys,
                 const RowOperand<P>& key_rows, int64_t from, const BlockScratch<P>& scratch, Scalar<P>* s,
                 Scalar<P>* factor) {
  if (!shows_block(p, strip, key, keys, scratch.mask)) return false;
  dot_block(strip, key_rows, from, keys, p.head_dim, s);
  *factor = finish_scores(p, strip, key, keys, scratch, s);
  return true;
}

// Calls body with the Weighing for scores that are still to be multiplied by `factor`.
template <class P, class Body>
void with_weighing(const AttentionParams& p, Scalar<P> factor, const Body& body) {
  if constexpr (kDirect<P>) {
    body(Weighing<Weigh::kWhole>{});
  } else if constexpr (P::kFloatWeights) {
    factor == 1 ? body(Weighing<Weigh::kThreePieces>{}) : body(Weighing<Weigh::kScaledThreePieces>{});
  } else if (P::pieces(p) == 1) {
    factor == 1 ? body(Weighing<Weigh::kOnePiece>{}) : body(Weighing<Weigh::kScaledOnePiece>{});
  } else if (P::pieces(p) == 2) {
    factor == 1 ? body(Weighing<Weigh::kTwoPieces>{}) : body(Weighing<Weigh::kScaledTwoPieces>{});
  } else {
    factor == 1 ? body(Weighing<Weigh::kThreePieces>{}) : body(Weighing<Weigh::kScaledThreePieces>{});
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
