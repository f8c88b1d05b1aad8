// A panel of the backward: neighbouring strips of one head. They meet a block of keys one after the other, so
// that what they add to dK and dV is one product. Also here are the blocks that wait for a faster product of
// many, and the rows of the next panel.
#pragma once

#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The operands and sums of the backward's products, for a panel and a chunk of keys.
template <class P>
struct GradientPanel {
  using T = Scalar<P>;

  GradientStrip<P>* strips;
  const VectorOperand<P>*query_rows, *grad_out_rows;
  const RowOperand<P>*key_rows, *value_rows;
  const ColumnOperand<P>* key_columns;
  int64_t first_key;         // the chunk's first
  T* const* grad_query_t;    // of each strip [head_dim][kLanes]
  T *grad_key, *grad_value;  // of the chunk
  int64_t head_stride, value_stride;
};

// A whole block of keys, from row `from` of the operands on, with the strips first .. end - 1.
struct PanelBlock {
  int64_t from, first, end;
};

// Blocks in ascending order, which wait to be computed together.
struct PanelBlocks {
  static constexpr int64_t kMost = 8;
  PanelBlock blocks[kMost];
  int64_t count = 0;

  bool takes(int64_t from, int64_t strip) const {
    if (count == 0) return true;
    const PanelBlock& last = blocks[count - 1];
    return last.from == from ? last.end == strip : count < kMost;
  }
  void add(int64_t from, int64_t strip) {
    if (count > 0 && blocks[count - 1].from == from) {
      ++blocks[count - 1].end;
    } else {
      blocks[count++] = {from, strip, strip + 1};
    }
  }
};

// Tells whether add_blocks takes the blocks of a call that need weights and dS only as pairs, see
// PairedPlace.
template <class P>
bool adds_blocks(const AttentionParams&) {
  return false;
}

// Adds to dQ^T, dK and dV, to the bit, what grad_score_block and the products with its weights and dS would
// add.
template <class P>
void add_blocks(const AttentionParams&, const GradientPanel<P>&, const PanelBlocks&, GradientScratch<P>&) {}

// The rows that the next panel begins with. They are prefetched while this one is computed, some in each of a
// number of steps: otherwise loading pieces would wait for memory.
class ComingRows {
 public:
  ComingRows() = default;
  ComingRows(const RowSource& query, const RowSource& grad_out, const RowSource& out, int64_t rows,
             int64_t steps)
      : sources_{query, grad_out, out}, left_(rows), share_(divide_up(rows, steps)) {}

  void ask() {
    const int64_t rows = smaller(share_, left_);
    if (rows == 0) return;
    for (RowSource& source : sources_) {
      ask_for_rows(source, 0, rows);
      source = source.from(rows, left_ - rows);
    }
    left_ -= rows;
  }

 private:
  RowSource sources_[3] = {};
  int64_t left_ = 0, share_ = 0;  // rows that are left of each source, and those of a step
};

}  // namespace selfattn::cpu::SELFATTN_ISA
