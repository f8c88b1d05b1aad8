// The matrix product that all kernels are made of.
//
//     C[row][lane]  (=, +=, or scaled +=)  sum over k of A(row, k) * B[k][lane]
//
// A is read one scalar at a time and broadcast, so it needs no copy and no alignment: it is a key or value
// row in the user's tensor, or a row of weights. B and C are scratch with vectors of lanes. With kTransposed,
// A(row, k) is a[k * lda + row], otherwise a[row * lda + k]. Sums stay in registers and meet C once, at the
// end; long ones do so part by part (long_sums.h).
#pragma once

#include "long_sums.h"

namespace selfattn::cpu::SELFATTN_ISA {

enum class Update { kStore, kAdd, kScaleAdd };  // C = AB, C += AB, C = C * lane_scale + AB

// Operands of a product; lane_scale has one factor per lane and is read for kScaleAdd only.
template <class T>
struct Product {
  int64_t depth;
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  Update update;
  const T* lane_scale;
};

// Stores a tile's sums. The kind of update is tested once per tile: tested for every vector, it took a tenth
// of the time of the product.
template <class T, Update kUpdate, int kRows, int kVecs>
SELFATTN_INLINE void finish_tile(const typename Simd<T>::Vec (&sum)[kRows][kVecs], T* c, int64_t ldc,
                                 const T* lane_scale) {
  using S = Simd<T>;
  typename S::Vec scale[kVecs];
  if constexpr (kUpdate == Update::kScaleAdd) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) scale[v] = S::load(lane_scale + v * S::kWidth);
  }
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      T* at = c + r * ldc + v * S::kWidth;
      if constexpr (kUpdate == Update::kStore) {
        S::store(at, sum[r][v]);
      } else if constexpr (kUpdate == Update::kAdd) {
        S::store(at, S::add(S::load(at), sum[r][v]));
      } else {
        S::store(at, S::fma(S::load(at), scale[v], sum[r][v]));
      }
    }
  }
}

// Adds `depth` products to the sums of a tile. With kHalf, no more than half of the last vector's lanes
// count.
template <class T, int kRows, int kVecs, bool kHalf, bool kTransposed>
SELFATTN_INLINE void add_products(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t depth,
                                  typename Simd<T>::Vec (&sum)[kRows][kVecs]) {
  using S = Simd<T>;
  const int64_t a_row = kTransposed ? 1 : lda;
  const int64_t a_step = kTransposed ? lda : 1;
  for (int64_t k = depth; k > 0; --k) {
    typename S::Vec vec[kVecs];
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs - kHalf; ++v) vec[v] = S::load(b + v * S::kWidth);
    if constexpr (kHalf) vec[kVecs - 1] = LowerHalf<T>::load(b + (kVecs - 1) * S::kWidth);
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename S::Vec broadcast = S::set(a[r * a_row]);
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs - kHalf; ++v) sum[r][v] = S::fma(broadcast, vec[v], sum[r][v]);
      if constexpr (kHalf)
        sum[r][kVecs - 1] = LowerHalf<T>::fma(broadcast, vec[kVecs - 1], sum[r][kVecs - 1]);
    }
    a += a_step;
    b += ldb;
  }
}

// The same sums, bit by bit, where an instruction takes a factor from any lane of a vector (kByLane). A
// broadcast would need a place among the multiply-adds, so that factors are loaded a vector at a time
// instead: those of one row for several k, or with kTransposed those of several rows for one k.
template <class T, int kRows, int kVecs, bool kTransposed>
SELFATTN_INLINE void add_products_by_lane(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t depth,
                                          typename Simd<T>::Vec (&sum)[kRows][kVecs]) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  constexpr int kSteps = kTransposed ? 1 : kWidth;
  constexpr int kFactors = kTransposed ? divide_up(kRows, kWidth) : kRows;
  // The last vector of several rows ends with the tile, so that nothing is read behind it.
  const auto first_row = [](int f) { return f * kWidth < kRows - kWidth ? f * kWidth : kRows - kWidth; };
  for (; depth >= kSteps; depth -= kSteps) {
    typename S::Vec factors[kFactors];
    SELFATTN_UNROLL
    for (int f = 0; f < kFactors; ++f) factors[f] = S::load(a + (kTransposed ? first_row(f) : f * lda));
    SELFATTN_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      typename S::Vec vec[kVecs];
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) vec[v] = S::load(b + v * kWidth);
      SELFATTN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int f = kTransposed ? r / kWidth : r, lane = kTransposed ? r - first_row(f) : step;
        SELFATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) sum[r][v] = S::fma_lane(vec[v], factors[f], lane, sum[r][v]);
      }
      b += ldb;
    }
    a += kTransposed ? lda : kSteps;
  }
  if constexpr (kSteps > 1) add_products<T, kRows, kVecs, false, kTransposed>(a, lda, b, ldb, depth, sum);
}

// With kHalf, no more than half of the last vector's lanes are in use, and the others of C meet zeros. A
// processor that computes 512 bits in two steps (Zen 4) then saves one of them.
template <class T, int kRows, int kVecs, bool kHalf, bool kTransposed>
__attribute__((noinline)) void multiply_tile(const Product<T>& p, int64_t row, int64_t lane) {
  using S = Simd<T>;
  typename S::Vec sum[kRows][kVecs];
  SELFATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) sum[r][v] = S::set(T(0));
  }
  const T* a = p.a + (kTransposed ? row : row * p.lda);
  const T* b = p.b + lane;
  if constexpr (S::kByLane && (!kTransposed || kRows >= S::kWidth)) {
    add_products_by_lane<T, kRows, kVecs, kTransposed>(a, p.lda, b, p.ldb, p.depth, sum);
  } else {
    add_products<T, kRows, kVecs, kHalf, kTransposed>(a, p.lda, b, p.ldb, p.depth, sum);
  }
  if constexpr (kHalf) {
    SELFATTN_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r][kVecs - 1] = LowerHalf<T>::zeros_above(sum[r][kVecs - 1]);
  }
  T* c = p.c + row * p.ldc + lane;
  if (p.update == Update::kStore) {
    finish_tile<T, Update::kStore>(sum, c, p.ldc, nullptr);
  } else if (p.update == Update::kAdd) {
    finish_tile<T, Update::kAdd>(sum, c, p.ldc, nullptr);
  } else {
    finish_tile<T, Update::kScaleAdd>(sum, c, p.ldc, p.lane_scale + lane);
  }
}

template <class T, int kVecs, bool kHalf, bool kTransposed>
void multiply_rows(const Product<T>& p, int64_t rows, int64_t lane) {
  constexpr int kTile = Simd<T>::kTileRows;
  int64_t row = 0;
  for (; row + kTile <= rows; row += kTile) multiply_tile<T, kTile, kVecs, kHalf, kTransposed>(p, row, lane);
  if (kTile > 4 && row + 4 <= rows) {
    multiply_tile<T, 4, kVecs, kHalf, kTransposed>(p, row, lane);
    row += 4;
  }
  if (row + 2 <= rows) {
    multiply_tile<T, 2, kVecs, kHalf, kTransposed>(p, row, lane);
    row += 2;
  }
  if (row < rows) multiply_tile<T, 1, kVecs, kHalf, kTransposed>(p, row, lane);
}

// How many vectors the next tile takes of `vecs` that are left: never one alone where two and two would do.
template <class T>
int next_tile_vecs(int64_t vecs) {
  constexpr int kMost = Simd<T>::kTileVecs;
  if (vecs <= kMost) return static_cast<int>(vecs);
  return vecs == kMost + 1 && kMost > 2 ? kMost - 1 : kMost;
}

template <class T, bool kHalf, bool kTransposed>
void multiply_vecs(const Product<T>& p, int64_t rows, int64_t lane, int vecs) {
  if (vecs == 3) {
    multiply_rows<T, Simd<T>::kTileVecs, kHalf, kTransposed>(p, rows, lane);
  } else if (vecs == 2) {
    multiply_rows<T, 2, kHalf, kTransposed>(p, rows, lane);
  } else {
    multiply_rows<T, 1, kHalf, kTransposed>(p, rows, lane);
  }
}

template <class T, bool kTransposed>
void multiply_part(const Product<T>& p, int64_t rows, int64_t lanes) {
  using S = Simd<T>;
  for (int64_t lane = 0; lane < lanes;) {
    const int take = next_tile_vecs<T>(divide_up(lanes - lane, S::kWidth));
    const int64_t end = lane + take * S::kWidth;
    if (S::kHalves && lanes <= end - S::kWidth / 2) {
      multiply_vecs<T, S::kHalves, kTransposed>(p, rows, lane, take);
    } else {
      multiply_vecs<T, false, kTransposed>(p, rows, lane, take);
    }
    lane = end;
  }
}

// Computes the whole product: `rows` rows and the first `lanes` lanes, which are padded to whole vectors.
// What the lanes of the padding get is finite if C and B are.
template <class T, bool kTransposed>
void multiply(const Product<T>& p, int64_t rows, int64_t lanes) {
  const int64_t step = terms_of_part(p.depth);
  Product<T> part = p;
  int64_t done = 0;
  do {
    part.depth = smaller(p.depth - done, step);
    multiply_part<T, kTransposed>(part, rows, lanes);
    done += step;
    part.a += step * (kTransposed ? p.lda : 1);
    part.b += step * p.ldb;
    part.update = Update::kAdd;
  } while (done < p.depth);
}

// The slow product for data that holds Inf or NaN: a term whose key is hidden from its query is left out,
// where the fast product would compute 0 * NaN. `visible` is laid out like the weights (key rows, query
// lanes) and holds 1 or 0. Weights are either B (lanes are queries, and `visible` runs with B) or A (its rows
// and k).
template <class T, bool kTransposed>
void multiply_visible(const Product<T>& p, int64_t rows, int64_t vecs, const T* visible, int64_t ldv) {
  using S = Simd<T>;
  constexpr bool kWeightsAreB =
      kTransposed;  // out and grad_query; grad_key and grad_value have the weights in A
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t lane = 0; lane < vecs * S::kWidth; lane += S::kWidth) {
      auto sum = S::set(T(0));
      for (int64_t k = 0; k < p.depth; ++k) {
        const T a = kTransposed ? p.a[k * p.lda + row] : p.a[row * p.lda + k];
        const auto term = S::fma(S::set(a), S::load(p.b + k * p.ldb + lane), sum);
        if (kWeightsAreB) {
          sum = S::select(S::equal(S::load(visible + k * ldv + lane), S::set(T(0))), sum, term);
        } else if (visible[row * ldv + k] != T(0)) {
          sum = term;
        }
      }
      T* c = p.c + row * p.ldc + lane;
      if (p.update == Update::kAdd) sum = S::add(S::load(c), sum);
      if (p.update == Update::kScaleAdd) sum = S::fma(S::load(c), S::load(p.lane_scale + lane), sum);
      S::store(c, sum);
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
