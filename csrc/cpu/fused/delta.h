// delta = rowsum(dO * O), what the softmax's gradient subtracts from dP.
#pragma once

#include "../products/operands.h"

namespace selfattn::cpu::SELFATTN_ISA {

// delta[lane] = <out + residual, grad_out>, summed like dP in the product dP = dO * V^T: if a row sees a
// single key, O is that key's value, both sums round alike, and dP - delta is exactly 0.
template <class P>
struct Delta {
  LaneOperand<P> out, residual;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    out.allocate(p, p.value_dim, arena);
    residual.allocate(p, p.value_dim, arena);
  }
  void compute(const RowSource& out_rows, const RowSource& residual_rows, LaneOperand<P>& grad_out,
               int64_t vecs, P* delta) {
    using S = Simd<P>;
    out.load(out_rows);
    const bool rest = residual_rows.data != nullptr;
    const int64_t step = terms_of_part(out_rows.columns);
    if (rest) residual.load(residual_rows);
    for (int64_t lane = 0; lane < vecs * S::kWidth; lane += S::kWidth) {
      auto total = S::set(P(0));
      for (int64_t first = 0; first < out_rows.columns; first += step) {
        auto sum = S::set(P(0));
        for (int64_t e = first; e < out_rows.columns && e < first + step; ++e) {
          const int64_t at = e * kLanes<P> + lane;
          auto x = S::load(out.data + at);
          if (rest) x = S::add(x, S::load(residual.data + at));
          sum = S::fma(x, S::load(grad_out.data + at), sum);
        }
        total = S::add(total, sum);
      }
      S::store(delta + lane, total);
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
