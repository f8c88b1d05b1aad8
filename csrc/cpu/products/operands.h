// The operands of matrix products, for the arithmetic P that a pass is written over. float and double compute
// with the tensors' numbers as they are (this file); Pairs computes float results from bfloat16 pieces
// (pairs/operands_of_pairs.h). The five kinds are named after what becomes of a tensor's rows in C = A * B,
// where the columns of C are lanes:
//
//     LaneOperand    B, one row per lane          Q and dO in S^T = K Q^T and dP^T = V dO^T
//     RowOperand     A, one row per row of C      K and V there
//     ColumnOperand  A, one column per row of C   V in O^T = V^T P^T, K in dQ^T = K^T dS^T
//     VectorOperand  B, rows as they are          dO in dV = P^T dO, Q in dK = dS^T Q
//     WeightOperand  a block of weights or their gradients, [keys][lanes], as A or as B
//
// A product that takes `visible` may get nullptr. Otherwise it leaves out every term whose key is hidden from
// its query, as multiply_visible does.
#pragma once

#include "arena.h"
#include "elementary.h"
#include "tensor_rows.h"
#include "tile_multiply.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kKeyBlock = 64;  // keys per block of scores; a multiple of 4, the keys of one Philox call

// Whether products are computed in P itself, not in pairs. Then the scale is part of Q^T, and strips may have
// few queries.
template <class P>
constexpr bool kDirect = true;

// Keys that the forward loads at a time, for all strips of an item.
template <class P>
int64_t loaded_keys(const AttentionParams&) {
  return 4 * kKeyBlock;
}

// The most strips of an item of the forward, which share the work of bringing keys and values in, and the
// most bytes of the level-2 cache that they may take.
template <class P>
constexpr int64_t kMostStrips = 16;
template <class P>
constexpr int64_t kStripCache = 768 * 1024;

// Strips of the backward that meet a block of keys one after the other, so that one product adds their parts
// of dK and dV.
template <class P>
constexpr int64_t kPanelStrips = 1;

// Whether the rows of a panel, which is a number of those strips, are prefetched during the panel before.
template <class P>
constexpr bool kAsksForNextPanel = false;

// The most bytes that dK and dV of a chunk of the backward may take.
template <class P>
constexpr int64_t kChunkBytes = 256 * 1024;

template <class P>
struct ScalarOf {
  using type = P;
};
// The type that P's sums are kept in.
template <class P>
using Scalar = typename ScalarOf<P>::type;

template <class P>
constexpr int64_t kLanes = Simd<Scalar<P>>::kTileVecs *
                           Simd<Scalar<P>>::kWidth;  // most queries of a strip, and every leading dimension

// What a worker holds while it multiplies, for products that need a state of the processor. float and double
// need none.
template <class P>
struct Session {};

template <class P>
struct LaneOperand {
  P* data;  // [columns][kLanes]

  bool rounds() const { return false; }
  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams&, int64_t columns, Arena& arena) {
    data = arena.take<P>(round_up_to_vector<P>(columns) * kLanes<P>);
  }
  void load(const RowSource& s, P factor = P(1)) {
    load_transposed<P>(data, kLanes<P>, s.data, s.dtype, s.stride, s.rows, s.columns, factor);
  }
};

// Rows are used where they lie if they hold P.
template <class P>
struct RowOperand {
  Rows<P> rows;
  P* buffer;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t count, int64_t columns, Arena& arena) {
    buffer = p.dtype == dtype_of<P>() ? nullptr : arena.take<P>(count * round_up_to_vector<P>(columns));
  }
  void load(const RowSource& s) { rows = rows_as<P>(s, false, buffer); }
  bool finite(int64_t count, int64_t columns) const {
    return all_finite(rows.data, rows.stride, count, columns);
  }
};

template <class P>
struct ColumnOperand : RowOperand<P> {
  // The same rows in another role, which needs no memory of its own.
  void allocate_shared(const AttentionParams&, int64_t, int64_t, Arena&) {}
  void load_shared(const RowSource&, const RowOperand<P>& same) { this->rows = same.rows; }
  // Whether products need `visible` although the caller found nothing wrong with the data.
  bool special(int64_t, int64_t) const { return false; }
  // Whether sums of the rows may overflow where nobody looks at the results, see overflow.h: float and double
  // look at every result.
  bool large() const { return false; }
};

template <class P>
struct VectorOperand {
  Rows<P> rows;
  P* buffer;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams&, int64_t count, int64_t columns, Arena& arena) {
    buffer = arena.take<P>(count * round_up_to_vector<P>(columns));
  }
  void load(const RowSource& s) { rows = rows_as<P>(s, true, buffer); }
  bool special() const { return false; }
  bool finite(int64_t count, int64_t columns) const {
    return all_finite(rows.data, rows.stride, count, columns);
  }
};

template <class P>
struct WeightOperand {
  P* block;  // [kKeyBlock][kLanes]

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams&, Arena& arena) {
    block = arena.take<P>(kKeyBlock * kLanes<P>);
  }
  // Stores four rows of vectors. kPaired is for operands that need no block, `used` for those that round.
  template <Weigh kWeigh, bool kPaired, class S>
  SELFATTN_INLINE void store(int64_t row, int64_t lane, const typename S::Vec (&v)[4],
                             typename S::Vec (&)[2]) const {
    SELFATTN_UNROLL
    for (int i = 0; i < 4; ++i) S::store(block + (row + i) * kLanes<P> + lane, v[i]);
  }
  // Whether weights are rounded to a single piece.
  bool rounds() const { return false; }
  // Whether outputs are summed where they lie, so that rescaling them is a pass of its own.
  template <Weigh>
  static constexpr bool kSumsInPlace = false;
  bool sums_in_place() const { return false; }
  // Must be called once the block is final, before the products that use it as B or as A.
  void ready_as_lanes(int64_t /*keys*/, int64_t /*vecs*/) {}
  void ready_as_rows(int64_t /*keys*/, int64_t /*first*/, int64_t /*queries*/, int64_t /*rows*/) {}
};

// c[j][lane] = <row from + j of a, lane of b>, or += with Update::kAdd.
template <class P>
void multiply_lanes(const RowOperand<P>& a, int64_t from, int64_t rows, LaneOperand<P>& b, int64_t columns,
                    int64_t lanes, Scalar<P>* c, Update update = Update::kStore) {
  multiply<P, false>({columns, a.rows.data + from * a.rows.stride, a.rows.stride, b.data, kLanes<P>, c,
                      kLanes<P>, update, nullptr},
                     rows, lanes);
}

// Sums [column][kLanes] that a product changes; lane_scale is read for Update::kScaleAdd alone.
template <class T>
struct ColumnSums {
  T* data;
  Update update = Update::kAdd;
  const T* lane_scale = nullptr;
};

// Updates c[column][lane] by the sum over the keys j of a(from + j, column) * w[j][lane].
template <class P>
void multiply_columns(const ColumnOperand<P>& a, int64_t from, int64_t keys, int64_t columns,
                      const WeightOperand<P>& w, int64_t lanes, const ColumnSums<Scalar<P>>& c,
                      const Scalar<P>* visible) {
  const Product<P> product{keys,          a.rows.data + from * a.rows.stride,
                           a.rows.stride, w.block,
                           kLanes<P>,     c.data,
                           kLanes<P>,     c.update,
                           c.lane_scale};
  if (visible != nullptr) {
    multiply_visible<P, true>(product, columns, divide_up(lanes, Simd<P>::kWidth), visible, kLanes<P>);
  } else {
    multiply<P, true>(product, columns, lanes);
  }
}

// c[j][column] += sum over the queries i of w[j][i] * b(i, column); c has rows padded to whole vectors. The
// queries are first .. first + queries - 1 of a panel. Those of several strips may come at once if nothing is
// special and w is ready for them.
template <class P>
void multiply_weights(const WeightOperand<P>& w, int64_t keys, int64_t /*first*/, int64_t queries,
                      const VectorOperand<P>& b, int64_t columns, Scalar<P>* c, const Scalar<P>* visible) {
  const int64_t padded = round_up_to_vector<P>(columns);
  const Product<P> product{queries, w.block, kLanes<P>,    b.rows.data, b.rows.stride,
                           c,       padded,  Update::kAdd, nullptr};
  if (visible != nullptr) {
    multiply_visible<P, false>(product, keys, padded / Simd<P>::kWidth, visible, kLanes<P>);
  } else {
    multiply<P, false>(product, keys, columns);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
