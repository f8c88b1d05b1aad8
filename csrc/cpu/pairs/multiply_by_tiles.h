// PairEngine::multiply of engine_amx.h. One source compiles it for all that call it.
#pragma once

#include "engine_amx.h"

namespace selfattn::cpu::SELFATTN_ISA {

void PairEngine::multiply(const PairProduct& p, int64_t rows, int64_t vecs) {
  if (p.pieces == 3) return multiply_panels<3, 3>(p, rows, vecs);
  if (p.pieces == 1) return multiply_panels<1, 1>(p, rows, vecs);
  p.order == 2 ? multiply_panels<2, 2>(p, rows, vecs) : multiply_panels<2, 3>(p, rows, vecs);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
