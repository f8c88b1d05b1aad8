// The tangents of a block of scores, for forward mode and second derivatives.
//
// Note [Tangents in float]
//     Weights, tangents of scores and gradients of either are as exact as T = Scalar<P> is, on instruction
//     sets that multiply bfloat16 pieces too. A tangent counts by its distance from the row's mean, and for
//     numbers rounded to one or two pieces that distance would be mostly rounding error. Inputs of bfloat16
//     are one piece without any rounding, so products of two of them may be pairs; and a float is three
//     pieces, which tiles multiply with inputs faster than vectors multiply it. That is P = ExactPairs
//     (pairs/exact_pairs.h). Inputs of other types would be several pieces, too.
#pragma once

#include "../products/key_rows.h"
#include "forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A call with its direction.
struct TangentCall {
  const AttentionParams& p;
  const Tangents& t;
  AttentionParams mask;  // the call whose mask is the mask's tangent

  TangentCall(const AttentionParams& params, const Tangents& tangents)
      : p(params), t(tangents), mask(params) {
    mask.mask = tangents.mask;
  }
};

// The products in which the rows of a block take part: with queries or gradients of the output, with weights,
// or both.
enum class Meets { kLanes, kWeights, kBoth };

// Rows in both of these roles, which direct products keep in one place.
template <class P>
struct TangentRows {
  RowOperand<P> with_lanes;
  ColumnOperand<P> with_weights;
  char* pages;  // see key_source

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t columns, Arena& arena) {
    with_lanes.allocate(p, kKeyBlock, columns, arena);
    if (!kDirect<P>) with_weights.allocate(p, kKeyBlock, columns, arena);
    pages = arena.take<char>(block_bytes(p, kKeyBlock, columns));
  }
  SELFATTN_OUT_OF_LINE void load(const RowSource& s, Meets meets) {
    if constexpr (kDirect<P>) {
      with_lanes.load(s);
      with_weights.load_shared(s, with_lanes);
    } else {
      if (meets != Meets::kWeights) with_lanes.load(s);
      if (meets != Meets::kLanes) with_weights.load(s);
    }
  }
};

// Keys and values of a block, and their tangents where there are any.
template <class P>
struct TangentKeys {
  TangentRows<P> keys, values, key_tangents, value_tangents;
  int64_t first, count;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    for (TangentRows<P>* rows : {&keys, &key_tangents}) rows->allocate(p, p.head_dim, arena);
    for (TangentRows<P>* rows : {&values, &value_tangents}) rows->allocate(p, p.value_dim, arena);
  }

  // Keys first_key .. first_key + keys - 1.
  SELFATTN_OUT_OF_LINE void load(const TangentCall& call, int64_t batch, int64_t kv_head, int64_t first_key,
                                 int64_t keys_of_block, Meets of_keys, Meets of_values) {
    first = first_key;
    count = keys_of_block;
    const AttentionParams& p = call.p;
    const auto load_one = [&](TangentRows<P>& rows, const View& view, int64_t columns, Meets meets) {
      if (view.data == nullptr) return;
      rows.load(key_source(p, view, batch, kv_head, first, count, columns, rows.pages), meets);
    };
    load_one(keys, p.key, p.head_dim, of_keys);
    load_one(key_tangents, call.t.key, p.head_dim, of_keys);
    load_one(values, p.value, p.value_dim, of_values);
    load_one(value_tangents, call.t.value, p.value_dim, of_values);
  }

  // Tells whether all rows that meet weights are finite.
  bool finite(const TangentCall& call) const {
    const auto finite_one = [&](const TangentRows<P>& rows, const View& view, int64_t columns) {
      return view.data == nullptr || rows.with_weights.finite(count, columns);
    };
    const AttentionParams& p = call.p;
    return finite_one(keys, p.key, p.head_dim) && finite_one(key_tangents, call.t.key, p.head_dim) &&
           finite_one(values, p.value, p.value_dim) && finite_one(value_tangents, call.t.value, p.value_dim);
  }
};

// The lane operands of the tangents of a strip's scores.
template <class P>
struct TangentLanes {
  LaneOperand<P> tangent;  // scale * tangent of Q; the scale as far as it is in the strip's query
  LaneOperand<P> query;    // scale * Q for few queries, whose strips have it in another form

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    tangent.allocate(p, p.head_dim, arena);
    query.allocate(p, p.head_dim, arena);
  }
  void begin(const TangentCall& call, const QueryStrip<P>& strip) {
    using T = Scalar<P>;
    const AttentionParams& p = call.p;
    const T scale = strip.rest_of_scale == T(1) ? static_cast<T>(p.scale) : T(1);
    if (call.t.query.data != nullptr) tangent.load(strip.source(p, call.t.query, p.head_dim), scale);
    if (call.t.key.data != nullptr && strip.few_queries) {
      query.load(strip.source(p, p.query, p.head_dim), scale);
    }
  }
};

// Computes the tangents of final scores, result[j][lane], for a block whose scores have been computed:
// scratch holds their tanh of the softcap. `of_cap`, if given, gets the part that comes through the softcap.
// Tangents of hidden scores may be anything.
template <class P>
void tangent_block(const TangentCall& call, QueryStrip<P>& strip, TangentLanes<P>& lanes,
                   const TangentKeys<P>& block, const BlockScratch<P>& scratch, Scalar<P>* result,
                   Scalar<P>* of_cap = nullptr) {
  using T = Scalar<P>;
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const AttentionParams& p = call.p;
  Update update = Update::kStore;
  const auto add = [&](const TangentRows<P>& rows, LaneOperand<P>& of_query) {
    multiply_lanes<P>(rows.with_lanes, 0, block.count, of_query, p.head_dim, strip.count, result, update);
    update = Update::kAdd;
  };
  if (call.t.query.data != nullptr) add(block.keys, lanes.tangent);
  if (call.t.key.data != nullptr) add(block.key_tangents, strip.few_queries ? lanes.query : strip.query);
  const bool any = update == Update::kAdd, capped = p.softcap > 0.0;
  const bool sloped = call.t.alibi_slopes.data != nullptr, masked = call.t.mask.data != nullptr;
  const bool scaled = strip.rest_of_scale != T(1);
  if (any && !scaled && !capped && !sloped && !masked) return;

  if (masked) load_mask_block(call.mask, strip, block.first, block.count, scratch.mask);
  const auto slope = S::set(sloped ? head_scalar<T>(call.t.alibi_slopes, strip.batch, strip.head) : T(0));
  T lane_index[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) lane_index[i] = static_cast<T>(i);
  const auto lane_numbers = S::load(lane_index);
  const int64_t corner = strip.first + p.query_offset - block.first;
  for (int64_t j = 0; j < block.count; ++j) {
    for (int64_t v = 0; v < strip.vecs; ++v) {
      const int64_t at = j * ld + v * S::kWidth;
      auto x = any ? S::load(result + at) : S::set(T(0));
      if (scaled) x = S::mul(x, S::set(strip.rest_of_scale));
      if (capped) {
        const auto t = S::load(scratch.capped + at);
        x = S::mul(x, S::sub(S::set(T(1)), S::mul(t, t)));
        if (of_cap != nullptr) S::store(of_cap + at, x);
      }
      if (sloped) x = S::sub(x, S::mul(slope, distances<T>(corner + v * S::kWidth - j, lane_numbers)));
      if (masked) x = S::add(x, S::load(scratch.mask + at));
      S::store(result + at, x);
    }
  }
}

// Returns the origins of a vector of queries after a block with these weights and tangents. The part that all
// tangents of a row have in common only costs digits of their sums. Each row therefore counts its tangents
// from an origin, their mean over the first block that it sees; it is NaN until then.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec tangent_origin(int64_t keys, const T* weights, const T* tangents,
                                                     typename Simd<T>::Vec origin) {
  using S = Simd<T>;
  const auto unknown = S::select(S::equal(origin, origin), S::set(T(0)), S::set(T(1)));
  if (!S::any(S::less(S::set(T(0)), unknown))) return origin;
  const auto zero = S::set(T(0));
  auto sum = zero, of_weights = zero;
  for (int64_t j = 0; j < keys; ++j) {
    const auto weight = S::abs(S::load(weights + j * kLanes<T>));
    const auto term = S::mul(weight, S::load(tangents + j * kLanes<T>));
    sum = S::add(sum, S::select(S::equal(weight, zero), zero, term));
    of_weights = S::add(of_weights, weight);
  }
  // 0 / 0 leaves the origin unknown.
  return S::select(S::equal(origin, origin), origin, S::div(sum, of_weights));
}

}  // namespace selfattn::cpu::SELFATTN_ISA
