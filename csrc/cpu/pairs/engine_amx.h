// Products of bfloat16 pairs by AMX tiles. TDPBF16PS multiplies 16 rows of 32 numbers by 16 pairs of 16
// lanes. Two by two tiles of C are summed at a time, so that every tile of A and B that is loaded is used
// twice.
#pragma once

#include "tile_sums.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The instructions are written as text, because compilers differ in what their intrinsics accept (GCC 12
// declares that _tile_loadconfig reads 8 of its 64 bytes). Tile numbers are part of the instruction.
template <int kTile>
SELFATTN_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
SELFATTN_INLINE void tile_load(const void* data, int64_t stride_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(stride_bytes), "i"(kTile) : "memory");
}
// Loads data that will not be used again soon, and leaves the level-1 cache to the rest.
template <int kTile>
SELFATTN_INLINE void tile_load_once(const void* data, int64_t stride_bytes) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
SELFATTN_INLINE void tile_store(void* data, int64_t stride_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(data), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kC, int kA, int kB>
SELFATTN_INLINE void tile_dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// Configures the tiles of a thread for as long as it has work: all eight have 16 rows of 64 bytes. The
// destructor restores what was configured before, by another library perhaps.
class PairEngine {
 public:
  static constexpr bool kTiles = true;   // A has its pairs next to each other, and whole tiles of rows
  static constexpr int kMostPieces = 3;  // they take six products, at 16 times the rate of a multiply-add
  static constexpr bool kDecodesDirect = true;  // see SELFATTN_FETCH_INTO in begin_amx.h

  PairEngine() {
    __asm__ volatile("sttilecfg %0" : "=m"(before_) : : "memory");
    configure(0, 16);
  }
  ~PairEngine() {
    if (before_[0] != 0) {
      __asm__ volatile("ldtilecfg %0" : : "m"(before_) : "memory");
    } else {
      __asm__ volatile("tilerelease" : : : "memory");
    }
  }
  PairEngine(const PairEngine&) = delete;
  PairEngine& operator=(const PairEngine&) = delete;

  // Gives the first `some` tiles `rows` rows each, and all others sixteen.
  static void configure(int some, int rows) {
    alignas(64) uint8_t configuration[64] = {1};  // palette
    for (int tile = 0; tile < 8; ++tile) {
      configuration[16 + 2 * tile] = 64;  // bytes per row
      configuration[48 + tile] = static_cast<uint8_t>(tile < some ? rows : 16);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
  }

  // Returns sum + first + second for each pair.
  SELFATTN_INLINE static __m512 add_pairs(__m512 sum, __m512i bits) {
    return _mm512_dpbf16_ps(sum, (__m512bh)bits, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // 1 and 1
  }

  // Rounds two rows of weights to bfloat16, returns them in pairs, and adds the rounded weights to `sum`. It
  // takes additions and logic only, which issue twice per cycle beside AMX instructions; a conversion or
  // vdpbf16ps takes two cycles even elsewhere. Ties go up.
  SELFATTN_INLINE static __m512i round_weights(__m512 above, __m512 below, __m512& sum) {
    const __m512i half = _mm512_set1_epi32(0x8000), kept = _mm512_set1_epi32(-65536);
    const __m512i first = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(above), half), kept);
    const __m512i second = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(below), half), kept);
    sum = _mm512_add_ps(sum, _mm512_add_ps(_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)));
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
  }

  // Defined in multiply_by_tiles.h, for one of the sources that call it.
  static void multiply(const PairProduct& p, int64_t rows, int64_t vecs);

  // A product for multiply_beside, of at least one step.
  struct Panel {
    const uint32_t* a;
    int64_t a_row, a_piece;
    int64_t a_second;        // from the first 16 rows to the second
    int64_t a_step, a_turn;  // from an even step of 16 pairs to the next one, and from an odd one
    const uint32_t* b;
    int64_t b_row, b_piece;
    TileSums c;
    int64_t steps;
  };

  // Computes C = A * B, or C += A * B with kAdd, while `work` makes kBeside steps of its own for every four
  // products of tiles. The tiles of C stay in their registers. The next product stores each of them when it
  // needs the register: by then the tile is complete, and nothing waits. `unstored` says where the tiles
  // belong, and is empty before the first product.
  template <int kPieces, int kOrder, int kBeside, bool kAdd, class Work>
  SELFATTN_INLINE static void multiply_beside(const Panel& p, TileSums& unstored, Work& work) {
    const uint32_t *a = p.a, *b = p.b;
    path_beside<kPieces, kOrder, 0, kBeside, true, kAdd>(p, a, b, unstored, work);
    for (int64_t step = 1; step < p.steps; ++step) {
      a += step % 2 != 0 ? p.a_step : p.a_turn;
      b += 16 * p.b_row;
      path_beside<kPieces, kOrder, 0, kBeside, false, kAdd>(p, a, b, TileSums{}, work);
    }
    unstored = p.c;
  }
  // Computes C += A * B by a sum of its own, which `sums` adds to C later. flush() adds the last sums, once
  // the last product is stored.
  template <int kPieces, int kOrder, int kBeside, class Work>
  SELFATTN_INLINE static void add_beside(Panel& p, SumsBeside& sums, TileSums& unstored, Work& work) {
    p.c = sums.take(p.c);
    multiply_beside<kPieces, kOrder, kBeside, false>(p, unstored, work);
    sums.finish();
  }
  // Steps of SumsBeside for every four products of tiles: its 16 steps must fit beside the shortest product.
  template <int kPieces>
  static constexpr int kSumsBeside = kPieces == 3 ? 4 : 8;

  // Stores the tiles that the last product left, if any.
  static void store_panel(TileSums& unstored) {
    if (unstored.data != nullptr) store<2, 2>(unstored.data, unstored.row);
    unstored = {};
  }

 private:
  // The order in which pieces of A and B are multiplied. Where it can, a step changes only one of the two, so
  // that the tiles of the other are loaded once for both steps. Small products come first.
  struct Path {
    int steps;
    int8_t a[6], b[6];
  };
  static constexpr Path path_of(int pieces, int order) {
    if (pieces == 3) return {6, {0, 0, 1, 1, 2, 0}, {2, 1, 1, 0, 0, 0}};
    if (pieces == 2) return order == 2 ? Path{3, {0, 0, 1}, {1, 0, 0}} : Path{4, {0, 1, 1, 0}, {1, 1, 0, 0}};
    return {1, {0}, {0}};
  }

  // Multiplies the pieces of one step, from place kAt of the path on.
  template <int kPieces, int kOrder, int kAt, int kBeside, bool kFirst, bool kAdd, class Work>
  SELFATTN_INLINE static void path_beside(const Panel& p, const uint32_t* a, const uint32_t* b,
                                          const TileSums& unstored, Work& work) {
    constexpr Path kPath = path_of(kPieces, kOrder);
    if constexpr (kAt < kPath.steps) {
      constexpr int kA = kPath.a[kAt], kB = kPath.b[kAt], kBefore = kAt > 0 ? kAt - 1 : 0;
      using Step = StepBeside<kFirst && kAt == 0, kAdd, kAt == 0 || kPath.a[kBefore] != kA,
                              kAt == 0 || kPath.b[kBefore] != kB>;
      const uint32_t *of_a = a + kA * p.a_piece, *of_b = b + kB * p.b_piece;
      if (kBeside > 0 && work.more()) {
        Step::template run<kBeside>(of_a, p.a_row, p.a_second, of_b, p.b_row, unstored, p.c, work);
      } else {
        Step::template run<0>(of_a, p.a_row, p.a_second, of_b, p.b_row, unstored, p.c, work);
      }
      path_beside<kPieces, kOrder, kAt + 1, kBeside, kFirst, kAdd>(p, a, b, unstored, work);
    }
  }

  // Four products of tiles. kFirst: they begin C, and first store the tiles that are in its place. kNewA,
  // kNewB: the tiles of A or B differ from those of the step before.
  template <bool kFirst, bool kAdd, bool kNewA, bool kNewB>
  struct StepBeside {
    template <int kBeside, class Work>
    SELFATTN_INLINE static void run(const uint32_t* a, int64_t a_row, int64_t a_second, const uint32_t* b,
                                    int64_t b_row, const TileSums& unstored, const TileSums& c, Work& work) {
      begin<0>(unstored, c);
      if constexpr (kNewA) tile_load_once<4>(a, a_row * 4);
      if constexpr (kNewB) tile_load<6>(b, b_row * 4);
      tile_dot<0, 4, 6>();
      work_beside<kBeside, 0>(work);
      begin<1>(unstored, c);
      if constexpr (kNewB) tile_load<7>(b + 16, b_row * 4);
      tile_dot<1, 4, 7>();
      work_beside<kBeside, 1>(work);
      begin<2>(unstored, c);
      if constexpr (kNewA) tile_load_once<5>(a + a_second, a_row * 4);
      tile_dot<2, 5, 6>();
      work_beside<kBeside, 2>(work);
      begin<3>(unstored, c);
      tile_dot<3, 5, 7>();
      work_beside<kBeside, 3>(work);
    }

   private:
    template <int kTile>
    SELFATTN_INLINE static void begin(const TileSums& unstored, const TileSums& c) {
      if constexpr (kFirst) {
        constexpr int64_t kRow = kTile / 2 * 16, kLane = kTile % 2 * 16;
        if (unstored.data != nullptr) {
          tile_store<kTile>(unstored.data + kRow * unstored.row + kLane, unstored.row * 4);
        }
        if constexpr (kAdd) {
          tile_load<kTile>(c.data + kRow * c.row + kLane, c.row * 4);
        } else {
          tile_zero<kTile>();
        }
      }
    }
    // Makes those of the kBeside steps of work that follow product kDot.
    template <int kBeside, int kDot, class Work>
    SELFATTN_INLINE static void work_beside(Work& work) {
      constexpr int kSteps = kBeside * (kDot + 1) / 4 - kBeside * kDot / 4;
      if constexpr (kSteps > 0) work.step();
      if constexpr (kSteps > 1) work.step();
    }
  };

  template <int kPieces, int kOrder>
  static void multiply_panels(const PairProduct& p, int64_t rows, int64_t vecs) {
    constexpr int64_t kPlace = kPieces > 1 ? SumsBeside::kSize : 1;
    alignas(64) float places[2 * kPlace];
    SumsBeside sums(places, places + kPlace);
    TileSums unstored;
    for (int64_t row = 0; row < rows; row += 32) {
      for (int64_t vec = 0; vec < vecs; vec += 2) {
        const bool two_rows = rows - row > 16, two_vecs = vecs - vec > 1;
        if (two_rows && two_vecs && p.pairs > 0 && p.update != Update::kScaleAdd) {
          multiply_panel<kPieces, kOrder>(p, row, vec * 16, sums, unstored);
          continue;
        }
        store_panel(unstored);
        if (two_rows && two_vecs) {
          multiply_block<2, 2>(p, row, rows, vec * 16);
        } else if (two_rows) {
          multiply_block<2, 1>(p, row, rows, vec * 16);
        } else if (two_vecs) {
          multiply_block<1, 2>(p, row, rows, vec * 16);
        } else {
          multiply_block<1, 1>(p, row, rows, vec * 16);
        }
      }
    }
    store_panel(unstored);
    if constexpr (kPieces > 1) sums.flush();
  }

  // Multiplies two by two tiles. C has whole tiles, whose rows past the last one are scratch.
  template <int kPieces, int kOrder>
  SELFATTN_INLINE static void multiply_panel(const PairProduct& p, int64_t row, int64_t lane,
                                             SumsBeside& sums, TileSums& unstored) {
    Panel panel;
    panel.a = p.a + row * p.a_row;
    panel.a_row = p.a_row;
    panel.a_second = 16 * p.a_row;
    panel.a_piece = p.a_piece;
    panel.a_step = panel.a_turn = 16;
    panel.b = p.b + lane;
    panel.b_row = p.b_pair;
    panel.b_piece = p.b_piece;
    panel.c = {p.c + row * p.ldc + lane, p.ldc};
    panel.steps = p.pairs / 16;
    NoWork none;
    if (p.update == Update::kStore) {
      multiply_beside<kPieces, kOrder, 0, false>(panel, unstored, none);
    } else if constexpr (kPieces == 1) {
      multiply_beside<1, 1, 0, true>(panel, unstored, none);
    } else {
      add_beside<kPieces, kOrder, kSumsBeside<kPieces>>(panel, sums, unstored, sums);
    }
  }

  // Tiles 0 to 3 are C, 4 and 5 A, 6 and 7 B. With one piece, a sum is no more exact than its terms, so it
  // goes on in the tiles, where rows past the last one meet zeros. With several pieces the sum is float's: a
  // block is summed by itself and then added.
  template <int kRows, int kVecs>
  static void multiply_block(const PairProduct& p, int64_t row, int64_t rows, int64_t lane) {
    float* c = p.c + row * p.ldc + lane;
    const bool in_tiles = p.update == Update::kAdd && p.pieces == 1;
    if (in_tiles) {
      load<kRows, kVecs>(c, p.ldc);
    } else {
      zero<kRows, kVecs>();
    }
    if (p.pieces == 1) {
      add_piece<kRows, kVecs>(p, row, lane);
    } else {
      add_pieces<kRows, kVecs>(p, row, lane);
    }
    // Rows past the last one are scratch, up to whole tiles.
    if (p.update == Update::kStore || in_tiles) return store<kRows, kVecs>(c, p.ldc);
    alignas(64) float sums[32 * 32];
    store<kRows, kVecs>(sums, 32);
    const int64_t end = smaller(rows - row, kRows * 16);
    for (int v = 0; v < kVecs; ++v) {
      const __m512 scale = p.update == Update::kScaleAdd ? _mm512_loadu_ps(p.lane_scale + lane + v * 16)
                                                         : _mm512_set1_ps(1.0f);
      float* to = c + v * 16;
      for (int64_t r = 0; r < end; ++r, to += p.ldc) {
        _mm512_storeu_ps(to,
                         _mm512_fmadd_ps(_mm512_loadu_ps(to), scale, _mm512_load_ps(sums + r * 32 + v * 16)));
      }
    }
  }

  template <int kRows, int kVecs>
  SELFATTN_INLINE static void add_piece(const PairProduct& p, int64_t row, int64_t lane) {
    const uint32_t *a = p.a + row * p.a_row, *b = p.b + lane;
    const int64_t a_bytes = p.a_row * 4, b_bytes = p.b_pair * 4, a_second = 16 * p.a_row,
                  b_step = 16 * p.b_pair;
    for (int64_t pair = p.pairs; pair > 0; pair -= 16) {
      tile_load_once<4>(a, a_bytes);
      tile_load<6>(b, b_bytes);
      if constexpr (kVecs == 2) tile_load<7>(b + 16, b_bytes);
      if constexpr (kRows == 2) tile_load_once<5>(a + a_second, a_bytes);
      dot<kRows, kVecs>();
      a += 16;
      b += b_step;
    }
  }

  template <int kRows, int kVecs>
  SELFATTN_INLINE static void add_pieces(const PairProduct& p, int64_t row, int64_t lane) {
    const Path path = path_of(p.pieces, p.order);
    for (int64_t pair = 0; pair < p.pairs; pair += 16) {
      const uint32_t *a_pair = p.a + row * p.a_row + pair, *b_pair = p.b + pair * p.b_pair + lane;
      int in_a = -1, in_b = -1;  // the pieces that the tiles hold
      for (int step = 0; step < path.steps; ++step) {
        const int i = path.a[step], j = path.b[step];
        if (j != in_b) {
          const uint32_t* b = b_pair + j * p.b_piece;
          tile_load<6>(b, p.b_pair * 4);
          if constexpr (kVecs == 2) tile_load<7>(b + 16, p.b_pair * 4);
          in_b = j;
        }
        if (i != in_a) {
          const uint32_t* a = a_pair + i * p.a_piece;
          tile_load_once<4>(a, p.a_row * 4);
          if constexpr (kRows == 2) tile_load_once<5>(a + 16 * p.a_row, p.a_row * 4);
          in_a = i;
        }
        dot<kRows, kVecs>();
      }
    }
  }

  template <int kRows, int kVecs>
  SELFATTN_INLINE static void dot() {
    tile_dot<0, 4, 6>();
    if constexpr (kVecs == 2) tile_dot<1, 4, 7>();
    if constexpr (kRows == 2) tile_dot<2, 5, 6>();
    if constexpr (kRows == 2 && kVecs == 2) tile_dot<3, 5, 7>();
  }
  template <int kRows, int kVecs>
  SELFATTN_INLINE static void zero() {
    tile_zero<0>();
    if constexpr (kVecs == 2) tile_zero<1>();
    if constexpr (kRows == 2) tile_zero<2>();
    if constexpr (kRows == 2 && kVecs == 2) tile_zero<3>();
  }
  template <int kRows, int kVecs>
  SELFATTN_INLINE static void load(const float* c, int64_t ldc) {
    tile_load<0>(c, ldc * 4);
    if constexpr (kVecs == 2) tile_load<1>(c + 16, ldc * 4);
    if constexpr (kRows == 2) tile_load<2>(c + 16 * ldc, ldc * 4);
    if constexpr (kRows == 2 && kVecs == 2) tile_load<3>(c + 16 * ldc + 16, ldc * 4);
  }
  template <int kRows, int kVecs>
  SELFATTN_INLINE static void store(float* c, int64_t ldc) {
    tile_store<0>(c, ldc * 4);
    if constexpr (kVecs == 2) tile_store<1>(c + 16, ldc * 4);
    if constexpr (kRows == 2) tile_store<2>(c + 16 * ldc, ldc * 4);
    if constexpr (kRows == 2 && kVecs == 2) tile_store<3>(c + 16 * ldc + 16, ldc * 4);
  }

  alignas(64) uint8_t before_[64];  // all zero if no tiles were configured
};

}  // namespace selfattn::cpu::SELFATTN_ISA
