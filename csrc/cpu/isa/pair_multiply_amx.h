// Products of bfloat16 pairs by AMX tiles: TDPBF16PS multiplies 16 rows of 32 numbers with 16 pairs of 16
// lanes. Two by two tiles of C are summed at a time, so that every tile of A and B that is loaded is used
// twice.
#pragma once

#include "../algorithm/pair_product.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Instructions as text, because compilers differ in what their intrinsics take (GCC 12 declares that
// _tile_loadconfig reads 8 of its 64 bytes). Tile numbers are part of the instruction.
template <int kTile>
SELFATTN_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
SELFATTN_INLINE void tile_load(const void* data, int64_t stride_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(stride_bytes), "i"(kTile) : "memory");
}
// For what will not be used again soon: it leaves the level-1 cache to the rest.
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

// All eight tiles are 16 rows of 64 bytes, in every thread that computes, for as long as it has work. Whoever
// configured them before, another library perhaps, finds its configuration again.
class PairEngine {
 public:
  static constexpr bool kTiles = true;   // A has its pairs next to each other, and whole tiles of rows
  static constexpr int kMostPieces = 3;  // six products at 16 times the rate of a multiply-add
  static constexpr bool kDecodesPlain = true;  // see SELFATTN_FETCH_INTO in kernels_amx.cpp

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

  // The first `some` tiles with fewer rows than sixteen.
  static void configure(int some, int rows) {
    alignas(64) uint8_t configuration[64] = {1};  // palette
    for (int tile = 0; tile < 8; ++tile) {
      configuration[16 + 2 * tile] = 64;  // bytes per row
      configuration[48 + tile] = static_cast<uint8_t>(tile < some ? rows : 16);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
  }

  // sum + first + second of each pair
  SELFATTN_INLINE static __m512 add_pairs(__m512 sum, __m512i bits) {
    return _mm512_dpbf16_ps(sum, (__m512bh)bits, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // 1 and 1
  }

  // The whole product of one piece, without a stop.
  SELFATTN_INLINE static void multiply_piece(const PairProduct& p, int64_t rows, int64_t vecs) {
    for (int64_t row = 0; row < rows; row += 32) {
      for (int64_t vec = 0; vec < vecs; vec += 2) {
        const bool two_rows = rows - row > 16, two_vecs = vecs - vec > 1;
        const uint32_t *a = p.a + row * p.a_row, *b = p.b + vec * 16;
        float* c = p.c + row * p.ldc + vec * 16;
        if (two_rows && two_vecs) {
          piece_block<2, 2>(p, a, b, c);
        } else if (two_rows) {
          piece_block<2, 1>(p, a, b, c);
        } else if (two_vecs) {
          piece_block<1, 2>(p, a, b, c);
        } else {
          piece_block<1, 1>(p, a, b, c);
        }
      }
    }
  }
  template <int kRows, int kVecs>
  SELFATTN_INLINE static void piece_block(const PairProduct& p, const uint32_t* a, const uint32_t* b,
                                          float* c) {
    const int64_t a_bytes = p.a_row * 4, b_bytes = p.ldb * 4, c_bytes = p.ldc * 4;
    const int64_t a_second = 16 * p.a_row, b_step = 16 * p.ldb;
    float* below = c + 16 * p.ldc;
    if (p.update == Update::kAdd) {
      tile_load<0>(c, c_bytes);
      if constexpr (kVecs == 2) tile_load<1>(c + 16, c_bytes);
      if constexpr (kRows == 2) tile_load<2>(below, c_bytes);
      if constexpr (kRows == 2 && kVecs == 2) tile_load<3>(below + 16, c_bytes);
    } else {
      tile_zero<0>();
      if constexpr (kVecs == 2) tile_zero<1>();
      if constexpr (kRows == 2) tile_zero<2>();
      if constexpr (kRows == 2 && kVecs == 2) tile_zero<3>();
    }
    for (int64_t pair = p.pairs; pair > 0; pair -= 16) {
      tile_load_once<4>(a, a_bytes);
      tile_load<6>(b, b_bytes);
      if constexpr (kVecs == 2) tile_load<7>(b + 16, b_bytes);
      if constexpr (kRows == 2) tile_load_once<5>(a + a_second, a_bytes);
      tile_dot<0, 4, 6>();
      if constexpr (kVecs == 2) tile_dot<1, 4, 7>();
      if constexpr (kRows == 2) tile_dot<2, 5, 6>();
      if constexpr (kRows == 2 && kVecs == 2) tile_dot<3, 5, 7>();
      a += 16;
      b += b_step;
    }
    tile_store<0>(c, c_bytes);
    if constexpr (kVecs == 2) tile_store<1>(c + 16, c_bytes);
    if constexpr (kRows == 2) tile_store<2>(below, c_bytes);
    if constexpr (kRows == 2 && kVecs == 2) tile_store<3>(below + 16, c_bytes);
  }

  // A product under way, a few tile instructions at a time, so that they can stand between those of other
  // work: a processor does both at once as far as it looks ahead, which is some hundred instructions. The
  // tiles are the product's until it is done.
  class Run {
   public:
    Run() = default;
    Run(const PairProduct& product, int64_t rows, int64_t vecs)
        : p_(product),
          path_(path_of(product.pieces, product.order)),
          rows_(rows),
          vecs_(vecs),
          left_((rows + 31) / 32 * ((vecs + 1) / 2) * path_.steps * (product.pairs / 16)) {}

    // How often step() has to be called.
    int64_t steps_left() const { return left_; }

    __attribute__((noinline)) void step() {
      const bool two_rows = rows_ - row_ > 16, two_vecs = vecs_ - vec_ > 1;
      if (two_rows && two_vecs) {
        advance<2, 2>();
      } else if (two_rows) {
        advance<2, 1>();
      } else if (two_vecs) {
        advance<1, 2>();
      } else {
        advance<1, 1>();
      }
      --left_;
    }
    void finish() {
      while (left_ > 0) step();
    }

   private:
    // Which pieces of A and B are multiplied, one pair after the other: each step changes one of the two
    // where it can, so that the tiles of the other are loaded once for both. Small products come first.
    struct Path {
      int steps;
      int8_t a[6], b[6];
    };
    static Path path_of(int pieces, int order) {
      if (pieces == 3) return {6, {0, 0, 1, 1, 2, 0}, {2, 1, 1, 0, 0, 0}};
      if (pieces == 2)
        return order == 2 ? Path{3, {0, 0, 1}, {1, 0, 0}} : Path{4, {0, 1, 1, 0}, {1, 1, 0, 0}};
      return {1, {0}, {0}};
    }

    PairProduct p_;
    Path path_;
    int64_t rows_, vecs_;
    int64_t row_ = 0, vec_ = 0;  // the block of C
    int64_t pair_ = 0;           // where in its depth
    int step_ = 0;               // on the path there
    int64_t left_ = 0;

    // Tiles 0 to 3 are C, 4 and 5 A, 6 and 7 B. Everything is asked for before any of it is used.
    template <int kRows, int kVecs>
    SELFATTN_INLINE void advance() {
      const int i = path_.a[step_], j = path_.b[step_];
      if (step_ == 0 || path_.b[step_ - 1] != j) {
        const uint32_t* b = p_.b + j * p_.b_piece + vec_ * 16 + pair_ * p_.ldb;
        tile_load<6>(b, p_.ldb * 4);
        if constexpr (kVecs == 2) tile_load<7>(b + 16, p_.ldb * 4);
      }
      if (step_ == 0 || path_.a[step_ - 1] != i) {
        const uint32_t* a = p_.a + i * p_.a_piece + row_ * p_.a_row + pair_;
        tile_load_once<4>(a, p_.a_row * 4);
        if constexpr (kRows == 2) tile_load_once<5>(a + 16 * p_.a_row, p_.a_row * 4);
      }
      if (step_ == 0 && pair_ == 0) begin<kRows, kVecs>();
      tile_dot<0, 4, 6>();
      if constexpr (kVecs == 2) tile_dot<1, 4, 7>();
      if constexpr (kRows == 2) {
        tile_dot<2, 5, 6>();
        if constexpr (kVecs == 2) tile_dot<3, 5, 7>();
      }
      if (++step_ < path_.steps) return;
      step_ = 0;
      pair_ += 16;
      if (pair_ < p_.pairs) return;
      pair_ = 0;
      end<kRows, kVecs>();
      vec_ += 2;
      if (vec_ < vecs_) return;
      vec_ = 0;
      row_ += 32;
    }

    // A sum of one piece is no more exact than its terms, so it goes on where it was: one product of some
    // depth or several after one another are the same to the bit. Those of several are float's: a block's own
    // sum comes first.
    bool adds_in_tiles() const { return p_.update == Update::kAdd && p_.pieces == 1; }
    float* c() const { return p_.c + row_ * p_.ldc + vec_ * 16; }

    template <int kRows, int kVecs>
    SELFATTN_INLINE void begin() const {
      if (adds_in_tiles()) {
        const float* c = this->c();
        tile_load<0>(c, p_.ldc * 4);
        if constexpr (kVecs == 2) tile_load<1>(c + 16, p_.ldc * 4);
        if constexpr (kRows == 2) tile_load<2>(c + 16 * p_.ldc, p_.ldc * 4);
        if constexpr (kRows == 2 && kVecs == 2) tile_load<3>(c + 16 * p_.ldc + 16, p_.ldc * 4);
        return;
      }
      tile_zero<0>();
      if constexpr (kVecs == 2) tile_zero<1>();
      if constexpr (kRows == 2) tile_zero<2>();
      if constexpr (kRows == 2 && kVecs == 2) tile_zero<3>();
    }

    // Rows past the last one, up to whole tiles, are scratch or have zeros added to them.
    template <int kRows, int kVecs>
    SELFATTN_INLINE void end() const {
      if (p_.update == Update::kStore || adds_in_tiles()) return store<kRows, kVecs>(c(), p_.ldc);
      alignas(64) float sums[32 * 32];
      store<kRows, kVecs>(sums, 32);
      const int64_t end = rows_ - row_ < kRows * 16 ? rows_ - row_ : kRows * 16;
      const int64_t lane = vec_ * 16;
      for (int v = 0; v < kVecs; ++v) {
        const __m512 scale = p_.update == Update::kScaleAdd ? _mm512_loadu_ps(p_.lane_scale + lane + v * 16)
                                                            : _mm512_set1_ps(1.0f);
        float* c = this->c() + v * 16;
        for (int64_t r = 0; r < end; ++r, c += p_.ldc) {
          _mm512_storeu_ps(
              c, _mm512_fmadd_ps(_mm512_loadu_ps(c), scale, _mm512_load_ps(sums + r * 32 + v * 16)));
        }
      }
    }

    template <int kRows, int kVecs>
    SELFATTN_INLINE static void store(float* c, int64_t ldc) {
      tile_store<0>(c, ldc * 4);
      if constexpr (kVecs == 2) tile_store<1>(c + 16, ldc * 4);
      if constexpr (kRows == 2) tile_store<2>(c + 16 * ldc, ldc * 4);
      if constexpr (kRows == 2 && kVecs == 2) tile_store<3>(c + 16 * ldc + 16, ldc * 4);
    }
  };

  SELFATTN_INLINE static void multiply(const PairProduct& p, int64_t rows, int64_t vecs) {
    if (p.pieces == 1 && p.pairs > 0 && p.update != Update::kScaleAdd) return multiply_piece(p, rows, vecs);
    Run run(p, rows, vecs);
    run.finish();
    if (p.pairs > 0 || p.update != Update::kStore) return;
    for (int64_t row = 0; row < rows; ++row) {  // sums of nothing
      memset(p.c + row * p.ldc, 0, static_cast<size_t>(vecs) * 64);
    }
  }

 private:
  alignas(64) uint8_t before_[64];  // all zero where nobody had
};

}  // namespace selfattn::cpu::SELFATTN_ISA
