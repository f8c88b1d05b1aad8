// One element of a mask's gradient, summed over the dimensions along which that element was broadcast; in
// float64, because a row of ds adds up to 0: what its sum loses on the way may be all that is left of it.
#pragma once

#include "formula.h"

namespace selfattn::cpu::loops {

// `Gradient` says which pairs sees() and what the gradient of a score is, at(b, h, i, j).score.
template <class Gradient>
struct MaskTask {
  Gradient gradient;
  const AttentionParams& p;
  const View& grad_mask;
  int64_t size[4];  // of the mask

  MaskTask(const Gradient& g, const AttentionParams& params, const View& result)
      : gradient(g), p(params), grad_mask(result) {
    const int64_t full[4] = {p.batch, p.heads, p.queries, p.keys};
    for (int d = 0; d < 4; ++d) size[d] = grad_mask.stride[d] == 0 ? 1 : full[d];
  }

  using Scratch = NoScratch;

  int64_t items() const { return size[0] * size[1] * size[2] * size[3]; }

  void operator()(int64_t item, Scratch&) const {
    const int64_t column = item % size[3];
    const RowIndex row(item / size[3], size[1], size[2]);

    double sum = 0;
    for (int64_t b = row.b; b < p.batch; b += size[0]) {
      for (int64_t h = row.h; h < p.heads; h += size[1]) {
        for (int64_t i = row.i; i < p.queries; i += size[2]) {
          for (int64_t j = column; j < p.keys; j += size[3]) {
            if (gradient.sees(b, h, i, j)) sum += static_cast<double>(gradient.at(b, h, i, j).score);
          }
        }
      }
    }
    // Calls for the sequences of a packed batch share what they may.
    sum += load<double>(grad_mask, row.b, row.h, row.i, column);
    store<double>(grad_mask, row.b, row.h, row.i, column, sum);
  }
};

}  // namespace selfattn::cpu::loops
