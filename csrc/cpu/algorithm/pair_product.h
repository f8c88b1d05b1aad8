// What a pair engine is asked for: C(row, lane) (=, +=, or scaled +=) sum over the depth of A(row, .) * B(.,
// lane), where A and B are sums of bfloat16 pieces in pairs (pieces.h). Products of the smallest pieces may
// be left out: they are below the rounding of what is kept.
#pragma once

#include "tile_multiply.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct PairProduct {
  int pieces;
  int order;          // products of pieces i and j are taken where i + j < order
  const uint32_t* a;  // strides count pairs
  int64_t a_row, a_pair, a_piece;
  const uint32_t* b;
  int64_t ldb, b_piece;
  int64_t pairs;  // depth / 2; whole steps for an engine of tiles
  float* c;
  int64_t ldc;
  Update update;
  const float* lane_scale;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
