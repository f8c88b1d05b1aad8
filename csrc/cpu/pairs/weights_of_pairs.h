// Blocks of weights and of dS in bfloat16 pieces: WeightOperand (operands.h) for P = Pairs.
#pragma once

#include "operands_of_pairs.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The block in float, and its pieces as B (pairs of keys) and as A (pairs of queries).
template <>
struct WeightOperand<Pairs> {
  // The rows of a strip are stored in whole steps, so the last strip of a panel needs room for a whole one.
  static constexpr int64_t kDepthOfRows =
      round_up((kPanelStrips<Pairs> - 1) * kLanes<Pairs> + round_up(kLanes<Pairs>, kDepthStep), kDepthStep);
  static constexpr int64_t kLanePieces = kKeyBlock / 2 * kLanes<Pairs>;
  static constexpr int64_t kRowPieces = kKeyBlock * kDepthOfRows / 2;  // at most

  float* block;     // [kKeyBlock][kLanes]
  uint32_t* lanes;  // [pair of keys][piece][kLanes]: pieces are no power of two apart
  uint32_t* rows;   // [piece][key][pairs of queries]: neighbours, or 16 apart with several pieces
  int64_t depth_of_rows, row_pieces;  // with several pieces there are no panels, and rows lie close together
  int pieces;
  uint32_t* pipeline;  // for pipeline.h: two blocks of weights and, with several pieces, a block's output
  float* masks;        // [2 blocks][2 halves][kKeyBlock][kLanes], for pipeline.h
  // [kLanes] 1 where the block may hold numbers without pieces: these lanes have pieces of 0, and products
  // use the block itself. nullptr if no lane has any.
  const float* in_float = nullptr;

  static int64_t pipeline_size(const AttentionParams& p) {
    if (!PairEngine::kTiles) return 0;
    const int64_t output = round_up_to_vector<float>(p.value_dim) * kLanes<Pairs>;
    return 4 * Pairs::pieces(p) * kLanePieces + (Pairs::pieces(p) > 1 ? output : 0);
  }
  static constexpr int64_t kMasks = PairEngine::kTiles ? 4 * kKeyBlock * kLanes<Pairs> : 0;
  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    pieces = Pairs::pieces(p);
    block = arena.take<float>(kKeyBlock * kLanes<Pairs>);
    lanes = arena.take<uint32_t>(pieces * kLanePieces);
    rows = arena.take<uint32_t>(pieces * kRowPieces);
    pipeline = arena.take<uint32_t>(pipeline_size(p));
    masks = arena.take<float>(kMasks);
    depth_of_rows = pieces == 1 ? kDepthOfRows : round_up(kLanes<Pairs>, kDepthStep);
    row_pieces = kKeyBlock * depth_of_rows / 2;
  }
  // Whether weights are rounded to a single piece.
  bool rounds() const { return pieces == 1; }

  template <Weigh kWeigh>
  static constexpr bool kSumsInPlace = PairEngine::kTiles && is_one_piece(kWeigh);
  bool sums_in_place() const { return PairEngine::kTiles && rounds(); }

  // `used` gets the sum of the rounded weights.
  template <Weigh kWeigh, bool kPaired, class S = Simd<float>>
  SELFATTN_INLINE void store(int64_t row, int64_t lane, const __m512 (&v)[4], __m512 (&used)[2]) const {
    SELFATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
      float* to = block + (row + 2 * i) * kLanes<Pairs> + lane;
      if constexpr (is_one_piece(kWeigh)) {
        const __m512i bits = PairEngine::round_weights(v[2 * i], v[2 * i + 1], used[i]);
        if constexpr (kPaired) {
          _mm512_storeu_si512(lane_pieces(row / 2 + i, 1) + lane, bits);
        } else {
          _mm512_storeu_ps(to, first_of_pairs(bits));
          _mm512_storeu_ps(to + kLanes<Pairs>, second_of_pairs(bits));
        }
      } else if constexpr (kPaired) {
        constexpr int kPieces = pieces_of(kWeigh);
        store_weight_pair<kPieces>(lane_pieces(row / 2 + i, kPieces) + lane, kLanes<Pairs>, v[2 * i],
                                   v[2 * i + 1]);
      } else {
        _mm512_storeu_ps(to, v[2 * i]);
        _mm512_storeu_ps(to + kLanes<Pairs>, v[2 * i + 1]);
      }
    }
  }
  SELFATTN_INLINE uint32_t* lane_pieces(int64_t pair, int count) const {
    return lanes + pair * count * kLanes<Pairs>;
  }
  SELFATTN_INLINE void store_lane_pair(int64_t pair, int64_t lane, __m512 above, __m512 below) const {
    uint32_t* to = lane_pieces(pair, pieces) + lane;
    if (pieces == 1) return store_weight_pair<1>(to, kLanes<Pairs>, above, below);
    if (pieces == 2) return store_weight_pair<2>(to, kLanes<Pairs>, above, below);
    store_weight_pair<3>(to, kLanes<Pairs>, above, below);
  }
  // Which of 16 lanes are in the pieces.
  SELFATTN_INLINE __mmask16 has_pieces(int64_t lane) const {
    if (in_float == nullptr) return 0xffff;
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(in_float + lane), _mm512_setzero_ps(), _CMP_EQ_OQ);
  }
  // Stores zeros after the paired rows that were stored up to a multiple of four, or two.
  void pad_lanes(int64_t keys, int64_t vecs, int64_t multiple = 4) {
    for (int64_t pair = divide_up(keys, multiple) * (multiple / 2); pair < product_pairs(keys); ++pair) {
      for (int64_t v = 0; v < vecs; ++v) {
        store_lane_pair(pair, v * 16, _mm512_setzero_ps(), _mm512_setzero_ps());
      }
    }
  }
  // Restores the block from its pairs, of a single piece.
  void unpair_lanes(int64_t keys, int64_t vecs) const {
    for (int64_t key = 0; key < keys; ++key) {
      for (int64_t lane = 0; lane < vecs * 16; lane += 16) {
        const __m512i bits = _mm512_loadu_si512(lane_pieces(key / 2, 1) + lane);
        _mm512_storeu_ps(block + key * kLanes<Pairs> + lane,
                         key % 2 == 0 ? first_of_pairs(bits) : second_of_pairs(bits));
      }
    }
  }
  void ready_as_lanes(int64_t keys, int64_t vecs) {
    for (int64_t pair = 0; pair < product_pairs(keys); ++pair) {
      for (int64_t lane = 0; lane < vecs * 16; lane += 16) {
        __m512 above = _mm512_setzero_ps(), below = above;
        if (2 * pair < keys) above = _mm512_loadu_ps(block + 2 * pair * kLanes<Pairs> + lane);
        if (2 * pair + 1 < keys) below = _mm512_loadu_ps(block + (2 * pair + 1) * kLanes<Pairs> + lane);
        const __mmask16 kept = has_pieces(lane);
        above = _mm512_maskz_mov_ps(kept, above);
        below = _mm512_maskz_mov_ps(kept, below);
        store_lane_pair(pair, lane, above, below);
      }
    }
  }
  // The strip begins with query `first` of its panel. Rows of zeros follow up to `end`, since other strips of
  // the panel see those keys. An engine of tiles adds whole tiles of rows.
  void ready_as_rows(int64_t keys, int64_t first, int64_t queries, int64_t end) {
    for (int64_t key = 0; key < keys; ++key) {
      for (int64_t lane = 0; lane < queries; lane += 32) {
        const float* from = block + key * kLanes<Pairs> + lane;
        // Lanes past the last query meet rows of zeros, and must be finite for that to give 0.
        Numbers x = load_32(from, DType::kFloat32, 0, queries - lane);
        x.first = _mm512_maskz_mov_ps(has_pieces(lane), x.first);
        if (queries - lane > 16) x.second = _mm512_maskz_mov_ps(has_pieces(lane + 16), x.second);
        uint32_t* to = row_pairs(key, first + lane);
        with_pieces(pieces, [&](auto count) {
          if constexpr (count.value == 1) {
            _mm512_storeu_si512(to, take_piece(x));
          } else {
            store_weight_pair<count.value>(to, row_pieces, x.first, x.second);
          }
        });
      }
    }
    pad_rows(keys, first, queries, end);
  }
  uint32_t* row_pairs(int64_t key, int64_t query) const { return rows + (key * depth_of_rows + query) / 2; }
  void pad_rows(int64_t keys, int64_t first, int64_t queries, int64_t end) {
    const int64_t rows_of_product = PairEngine::kTiles ? padded_rows(end) : end;
    for (int64_t key = keys; key < rows_of_product; ++key) {
      for (int64_t lane = 0; lane < queries; lane += 32) {
        for (int piece = 0; piece < pieces; ++piece) {
          _mm512_storeu_si512(row_pairs(key, first + lane) + piece * row_pieces, _mm512_setzero_si512());
        }
      }
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
