// Products with weights in ExactPairs, in float. Vectors of pairs multiply at twice the rate of float, but
// weights would be three pieces.
#pragma once

#include "exact_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <>
struct ColumnOperand<ExactPairs> : ColumnOperand<float> {};

template <>
struct VectorOperand<ExactPairs> : VectorOperand<float> {};

template <>
struct WeightOperand<ExactPairs> : WeightOperand<float> {};

template <>
inline void multiply_columns<ExactPairs>(const ColumnOperand<ExactPairs>& a, int64_t from, int64_t keys,
                                         int64_t columns, const WeightOperand<ExactPairs>& w, int64_t lanes,
                                         const ColumnSums<float>& c, const float* visible) {
  multiply_columns<float>(a, from, keys, columns, w, lanes, c, visible);
}

template <>
inline void multiply_weights<ExactPairs>(const WeightOperand<ExactPairs>& w, int64_t keys, int64_t first,
                                         int64_t queries, const VectorOperand<ExactPairs>& b, int64_t columns,
                                         float* c, const float* visible) {
  multiply_weights<float>(w, keys, first, queries, b, columns, c, visible);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
