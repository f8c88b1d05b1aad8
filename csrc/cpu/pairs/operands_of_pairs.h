// The operands of operands.h for P = Pairs, in bfloat16 pieces. An engine multiplies them (engine_*.h); sums
// are float.
//
// Some numbers have no pieces: NaN and Inf, and magnitudes whose pieces or products would overflow or vanish.
// Rows that hold one are special. A score of a special query or key is computed in float, by itself; a
// special row of values takes part as zeros and is then added in float, for the queries that see it. So the
// arithmetic of a row of the result depends on that row's query and on the keys that it sees, and on nothing
// else in the batch.
#pragma once

#include "load_pieces.h"

namespace selfattn::cpu::SELFATTN_ISA {

struct Pairs {
  static constexpr bool kFloatWeights = false;  // see ExactPairs
  static int pieces(const AttentionParams& p) {
    switch (p.dtype) {
      case DType::kBFloat16:
        return 1;
      case DType::kFloat16:
        return 2;
      default:
        return p.float32_precision == Float32Precision::kHighest ? 3
               : p.float32_precision == Float32Precision::kHigh  ? 2
                                                                 : 1;
    }
  }
  // The PairProduct::order of scores and dP: there a float16 keeps all its bits, since nothing damps an error
  // of a score.
  static int order_of_scores(const AttentionParams& p) { return p.dtype == DType::kFloat16 ? 3 : pieces(p); }
  static bool is_exact_factor(double factor) {
    int exponent;
    return std::frexp(factor, &exponent) == 0.5 && exponent > -30 && exponent < 30;
  }
};

template <>
constexpr bool kDirect<Pairs> = false;

// Splitting rows into pieces costs more than bringing them in, so more strips share it; and processors with
// tiles have 2 MB of level-2 cache.
template <>
constexpr int64_t kMostStrips<Pairs> = PairEngine::kTiles ? 32 : 16;
template <>
constexpr int64_t kStripCache<Pairs> = (PairEngine::kTiles ? 1408 : 768) * 1024;

// A tile of dK or dV is loaded and stored as a whole, however little is added to it.
template <>
constexpr int64_t kPanelStrips<Pairs> = 4;

// Measured without tiles only: loading pieces waited for memory for up to a tenth of the time.
template <>
constexpr bool kAsksForNextPanel<Pairs> = !PairEngine::kTiles;

// Each chunk splits all queries into pieces. Panels pass through a chunk so seldom that it may take half of
// the level-2 cache.
template <>
constexpr int64_t kChunkBytes<Pairs> = (PairEngine::kTiles ? 256 : 512) * 1024;

// A pipeline (pipeline.h) begins and ends with the loaded keys, so as many are loaded as leave the level-2
// cache room for strips. p.keys does not count here: elements of a batch share scratch that is laid out for
// one of them.
template <>
inline int64_t loaded_keys<Pairs>(const AttentionParams& p) {
  constexpr int64_t kLeast = 4 * kKeyBlock, kNumbers = 128 * 1024;
  if (!PairEngine::kTiles) return kLeast;
  const int64_t columns = padded_depth(larger(p.head_dim, p.value_dim)) * Pairs::pieces(p);
  return larger(kNumbers / columns / (2 * kKeyBlock) * (2 * kKeyBlock), kLeast);
}

template <>
struct ScalarOf<Pairs> {
  using type = float;
};

template <>
struct Session<Pairs> : PairEngine {};

template <>
struct LaneOperand<Pairs> {
  uint32_t* data;  // [piece][pair of columns][kLanes]
  int64_t piece_stride;
  int pieces;
  float factor;
  bool special;               // whether some lane is special
  float* is_special;          // [kLanes] 1 or 0
  LaneOperand<float> floats;  // the same in float, loaded when needed
  bool floats_are_loaded;
  RowSource source;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t columns, Arena& arena) {
    pieces = Pairs::pieces(p);
    piece_stride = padded_pairs(columns) * kLanes<Pairs>;
    data = arena.take<uint32_t>(pieces * piece_stride);
    is_special = arena.take<float>(kLanes<Pairs>);
    floats.allocate(p, columns, arena);
  }
  // Loads the rows times `power`, a power of two.
  SELFATTN_OUT_OF_LINE void load(const RowSource& s, float power = 1.0f) {
    source = s;
    factor = power;
    floats_are_loaded = false;
    special = false;
    Magnitudes seen = Magnitudes::none();
    with_pieces(pieces,
                [&](auto count) { load_lane_pieces<count.value>(data, piece_stride, s, factor, seen); });
    if (pieces == 1) return;
    const bool ordinary = seen.are_ordinary(pieces, s.is_gradient);
    for (int64_t lane = 0; lane < kLanes<Pairs>; ++lane) {
      const bool found = !ordinary && lane < s.rows && !is_ordinary_row(s, lane, pieces);
      is_special[lane] = found ? 1.0f : 0.0f;
      special |= found;
    }
  }
  bool rounds() const { return pieces == 1; }
  const LaneOperand<float>& as_float() {
    if (!floats_are_loaded) floats.load(source, factor);
    floats_are_loaded = true;
    return floats;
  }
};

template <>
struct RowOperand<Pairs> {
  const uint32_t* data;  // [piece][row][pairs]
  int64_t row_stride, piece_stride;
  int pieces, order;
  uint32_t* buffer;
  bool* is_special;  // [rows]
  bool any_special;
  float* float_buffer;  // [kKeyBlock][padded] for converting a block
  float* block;         // [kKeyBlock][kLanes]
  RowSource source;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t count, int64_t columns, Arena& arena) {
    pieces = Pairs::pieces(p);
    order = Pairs::order_of_scores(p);
    piece_stride = padded_rows(count) * padded_pairs(columns);
    buffer = arena.take<uint32_t>(pieces * piece_stride);
    is_special = arena.take<bool>(count);
    float_buffer = arena.take<float>(kKeyBlock * round_up_to_vector<float>(columns));
    block = arena.take<float>(kKeyBlock * kLanes<Pairs>);
  }
  SELFATTN_OUT_OF_LINE void load(const RowSource& s) {
    source = s;
    any_special = false;
    // Whole steps of bfloat16 rows are used where they lie, if rows begin at whole pairs.
    const bool whole = s.columns % kDepthStep == 0 && s.rows % 16 == 0 && s.stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(s.data) % sizeof(uint32_t) == 0;
    if (s.dtype == DType::kBFloat16 && whole) {
      data = static_cast<const uint32_t*>(s.data);
      row_stride = s.stride / 2;
      return;
    }
    data = buffer;
    row_stride = padded_pairs(s.columns);
    Magnitudes seen = Magnitudes::none();
    with_pieces(pieces, [&](auto count) { load_row_pieces<count.value>(buffer, piece_stride, s, seen); });
    if (pieces == 1) return;
    const bool ordinary = seen.are_ordinary(pieces, s.is_gradient);
    for (int64_t row = 0; row < s.rows; ++row) {
      is_special[row] = !ordinary && !is_ordinary_row(s, row, pieces);
      any_special |= is_special[row];
    }
  }
  bool special(int64_t from, int64_t rows) const {
    for (int64_t row = from; any_special && row < from + rows; ++row) {
      if (is_special[row]) return true;
    }
    return false;
  }
};

// Rows that take part in a product as zeros, and are added to its result in float.
struct SpecialRows {
  bool* marks;     // [rows]
  float* values;   // [kKeyBlock][padded columns] the special rows of a block, one after another
  float* weights;  // [kKeyBlock][kLanes] the weights that they meet
  float* visible;
  bool any;
  RowSource source;

  SELFATTN_OUT_OF_LINE void allocate(int64_t count, int64_t columns, Arena& arena) {
    marks = arena.take<bool>(count);
    values = arena.take<float>(kKeyBlock * round_up_to_vector<float>(columns));
    weights = arena.take<float>(kKeyBlock * kLanes<Pairs>);
    visible = arena.take<float>(kKeyBlock * kLanes<Pairs>);
  }
  // `seen` holds the magnitudes of all rows.
  SELFATTN_OUT_OF_LINE void mark(const RowSource& s, int pieces, const Magnitudes& seen) {
    source = s;
    any = false;
    const bool ordinary = seen.are_ordinary(pieces, s.is_gradient);
    for (int64_t row = 0; row < s.rows; ++row) {
      marks[row] = !ordinary && !is_ordinary_row(s, row, pieces);
      any |= marks[row];
    }
  }
  bool any_of(int64_t from, int64_t count) const {
    for (int64_t row = from; any && row < from + count; ++row) {
      if (marks[row]) return true;
    }
    return false;
  }
  void convert(int64_t row, int64_t at) const {
    load_padded_row<float>(values + at * round_up_to_vector<float>(source.columns),
                           element(source.data, source.dtype, row * source.stride), source.dtype,
                           source.columns, 1.0f);
  }
};

// Blocks of kKeyBlock rows, each in the layout that the engine wants.
template <>
struct ColumnOperand<Pairs> {
  uint32_t* data;  // [block][piece]..., see load_pieces
  int64_t piece_stride, block_stride, row_stride, pair_stride;
  int pieces;
  SpecialRows specials;
  bool any_large;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t count, int64_t columns, Arena& arena) {
    pieces = Pairs::pieces(p);
    piece_stride = kKeyBlock / 2 * padded_rows(columns);
    block_stride = pieces * piece_stride;
    row_stride = PairEngine::kTiles ? kKeyBlock / 2 : 1;
    pair_stride = PairEngine::kTiles ? 1 : padded_rows(columns);
    data = arena.take<uint32_t>(divide_up(count, kKeyBlock) * block_stride);
    specials.allocate(count, columns, arena);
  }
  SELFATTN_OUT_OF_LINE void load(const RowSource& s) {
    const Magnitudes seen = load_pieces(s, nullptr);
    specials.mark(s, pieces, seen);
    any_large = seen.any_from(kLargeExponent);
    if (specials.any) load_pieces(s, specials.marks);
  }
  SELFATTN_OUT_OF_LINE Magnitudes load_pieces(const RowSource& s, const bool* special) const {
    Magnitudes seen = Magnitudes::none();
    for (int64_t row = 0; row < s.rows; row += kKeyBlock) {
      const RowSource rows = s.from(row, smaller(s.rows - row, kKeyBlock));
      const bool* marks = special != nullptr ? special + row : nullptr;
      uint32_t* to = data + row / kKeyBlock * block_stride;
      with_pieces(pieces, [&](auto count) {
        if constexpr (PairEngine::kTiles) {
          load_column_pieces<count.value>(to, row_stride, piece_stride, rows, marks, seen);
        } else {
          load_row_pair_pieces<count.value>(to, pair_stride, piece_stride, rows, marks, seen);
        }
      });
    }
    return seen;
  }
  void allocate_shared(const AttentionParams& p, int64_t count, int64_t columns, Arena& arena) {
    allocate(p, count, columns, arena);
  }
  void load_shared(const RowSource& s, const RowOperand<Pairs>&) { load(s); }
  bool special(int64_t from, int64_t rows) const { return specials.any_of(from, rows); }
  bool finite(int64_t, int64_t) const { return !specials.any; }  // asked with one piece
  bool large() const { return any_large; }
};

template <>
struct VectorOperand<Pairs> {
  uint32_t* data;  // [piece][pair of rows][padded columns]
  int64_t piece_stride, pair_stride;
  int pieces;
  SpecialRows specials;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t count, int64_t columns, Arena& arena) {
    pieces = Pairs::pieces(p);
    piece_stride = padded_pairs(count) * padded_rows(columns);
    pair_stride = padded_rows(columns);
    data = arena.take<uint32_t>(pieces * piece_stride);
    specials.allocate(count, columns, arena);
  }
  // `in_float` marks more rows as special: see WeightOperand::in_float.
  SELFATTN_OUT_OF_LINE void load(const RowSource& s, const float* in_float = nullptr) {
    specials.mark(s, pieces, load_pieces(s, nullptr));
    for (int64_t row = 0; in_float != nullptr && row < s.rows; ++row) {
      if (in_float[row] != 0.0f) specials.any = specials.marks[row] = true;
    }
    if (specials.any) load_pieces(s, specials.marks);
  }
  SELFATTN_OUT_OF_LINE Magnitudes load_pieces(const RowSource& s, const bool* special) const {
    Magnitudes seen = Magnitudes::none();
    with_pieces(pieces, [&](auto count) {
      load_row_pair_pieces<count.value>(data, pair_stride, piece_stride, s, special, seen);
    });
    return seen;
  }
  bool special() const { return specials.any; }
  bool finite(int64_t, int64_t) const { return !specials.any; }  // asked with one piece
};

}  // namespace selfattn::cpu::SELFATTN_ISA
