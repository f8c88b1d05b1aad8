// The arithmetic of forward mode and second derivatives of bfloat16 inputs. Two inputs are multiplied in
// pairs, where each is its own only piece; weights are as exact as floats (Note [Tangents in float]). Scores
// have the bits of the forward's. exact_by_vectors.h and exact_by_tiles.h hold the products with weights.
#pragma once

#include "products_of_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct ExactPairs : Pairs {
  static constexpr bool kFloatWeights = true;
};

template <>
constexpr bool kDirect<ExactPairs> = false;

template <>
struct ScalarOf<ExactPairs> {
  using type = float;
};

template <>
struct Session<ExactPairs> : PairEngine {};

template <>
struct LaneOperand<ExactPairs> : LaneOperand<Pairs> {
  bool rounds() const { return false; }  // weights are not in pairs
};

template <>
struct RowOperand<ExactPairs> : RowOperand<Pairs> {};

template <>
struct Delta<ExactPairs> : Delta<Pairs> {};

template <>
inline void multiply_lanes<ExactPairs>(const RowOperand<ExactPairs>& a, int64_t from, int64_t rows,
                                       LaneOperand<ExactPairs>& b, int64_t columns, int64_t lanes, float* c,
                                       Update update) {
  multiply_lanes<Pairs>(a, from, rows, b, columns, lanes, c, update);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
