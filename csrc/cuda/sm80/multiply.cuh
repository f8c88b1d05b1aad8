// The two matrix products of a tile on tensor cores, by mma.sync.
//
// ldmatrix reads operands from swizzled tiles, four 8 x 8 matrices at a time. A lane's address is a constant
// of the thread, except for the step along the row: an exclusive or within the bytes that the swizzle
// permutes. All the rest is a constant of the instruction.
#pragma once

#include "../mma/paired_weights.cuh"
#include "sm80_shared_memory.cuh"

namespace selfattn::cuda::sm80 {

using mma::LeftBlock;

// The lane's part in reading blocks of 16 rows by 16 columns. kRowsFirst: matrices 0 and 1 are the upper and
// lower rows (queries, values), otherwise the left and right columns (keys).
template <class C, bool kRowsFirst>
struct BlockReader {
  using Swizzle = sm80::Swizzle<C::kDim>;
  const unsigned char* tile;
  int first;  // the offset of columns 0 .. 15 of the lane's row

  __device__ __forceinline__ BlockReader(const unsigned char* tile_of_rows, int first_row, int lane)
      : tile(tile_of_rows) {
    const int lower = (kRowsFirst ? lane >> 3 : lane >> 4) & 1,
              right = (kRowsFirst ? lane >> 4 : lane >> 3) & 1;
    first = mma::of_thread<C>(Swizzle::offset(first_row + (lane & 7) + lower * 8, right));
  }
  // The address for columns 16 * step .. + 15 and rows moved by a multiple of 16.
  __device__ __forceinline__ const unsigned char* at(int step, int rows) const {
    constexpr int kSteps = Swizzle::kSpan / 32;
    return tile + (first ^ (step % kSteps << 5)) +
           (step / kSteps * Swizzle::kSpan + rows * Swizzle::kRowBytes);
  }
};

// The products of pieces that are kept, smallest first: tensor cores cut their running sum off instead of
// rounding it, relative to what it holds by then. Two pieces begin at the fourth product, one at the last.
constexpr int kProducts = 6;
__host__ __device__ constexpr int left_piece(int product) {
  return product == 0 ? 2 : product == 1 || product == 3 ? 1 : 0;
}
__host__ __device__ constexpr int right_piece(int product) {
  return product == 2 ? 2 : product == 1 || product == 4 ? 1 : 0;
}
// Whether numbers have no such piece. 16-bit types do not ask: their loads would all be under a condition,
// and the compiler would keep one register buffer for them, so that every product waits for its own load.
template <class C>
__device__ __forceinline__ bool left_out(int piece, int pieces) {
  return C::kPieces > 1 && piece >= pieces;
}
__device__ __forceinline__ int first_product(int pieces) { return pieces == 3 ? 0 : pieces == 2 ? 3 : 5; }

template <class C>
using RightBlock = uint32_t[C::kPieces][4];  // 16 by two times 8 columns

// sums[strip][first], [first + 1] += a b. float32 sums the products of pieces of these 16 terms by themselves
// and adds the result in float: otherwise long sums would lose the bits that are cut off, all in one
// direction.
template <class C, int kTiles>
__device__ __forceinline__ void multiply_block(const LeftBlock<C>& a, const RightBlock<C>& b, int pieces,
                                               float (&sums)[C::kStrips][kTiles][4], int first) {
  using A = mma::Arithmetic<C::kDType>;
  if constexpr (!C::kFloat32) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      A::multiply(sums[strip][first], a[0][strip], b[0][0], b[0][1]);
      A::multiply(sums[strip][first + 1], a[0][strip], b[0][2], b[0][3]);
    }
  } else {
    float block[C::kStrips][2][4] = {};
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      if (n < first_product(pieces)) continue;
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
        const auto& left = a[left_piece(n)][strip];
        const auto& right = b[right_piece(n)];
        A::multiply(block[strip][0], left, right[0], right[1]);
        A::multiply(block[strip][1], left, right[2], right[3]);
      }
    }
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[strip][first][i] += block[strip][0][i];
        sums[strip][first + 1][i] += block[strip][1][i];
      }
    }
  }
}

// A tile of shared memory as a warp reads it: planes of pieces, from one of its rows on.
struct Operand {
  const unsigned char* tile;
  int plane_bytes;
  int first_row;
};

// sums = left right^T over `dim`: unscaled scores from queries and keys.
template <class C, int kTiles>
__device__ __forceinline__ void multiply_rows(const Operand& left, const Operand& right, int lane, int dim,
                                              int pieces, float (&sums)[C::kStrips][kTiles][4]) {
  const BlockReader<C, true> left_reader(left.tile, left.first_row, lane);
  const BlockReader<C, false> right_reader(right.tile, right.first_row, lane);
  mma::clear(sums);
#pragma unroll
  for (int step = 0; step < C::kDim / 16; ++step) {
    if (C::asks_whether_beyond(step) && step * 16 >= dim) break;
    LeftBlock<C> a;
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      if (left_out<C>(piece, pieces)) break;
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
        ptx::load_matrix_x4(a[piece][strip], left_reader.at(step, strip * 16) + piece * left.plane_bytes);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      RightBlock<C> b;
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) {
        if (left_out<C>(piece, pieces)) break;
        ptx::load_matrix_x4(b[piece], right_reader.at(step, tile * 8) + piece * right.plane_bytes);
      }
      multiply_block<C>(a, b, pieces, sums, tile);
    }
  }
}

// output += weights right, as for weights and values: columns of the weights are rows of `right`. block(n)
// gives columns 16 n .. + 15 of the weights.
template <class C, int kBlocks, class Block>
__device__ __forceinline__ void accumulate_blocks(const Block& block, const Operand& right, int lane, int dim,
                                                  int pieces, float (&output)[C::kStrips][C::kDimTiles][4]) {
  const BlockReader<C, true> reader(right.tile, right.first_row, lane);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const LeftBlock<C>& a = block(n);
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      if (C::asks_whether_beyond(step) && step * 16 >= dim) break;
      RightBlock<C> b;
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) {
        if (left_out<C>(piece, pieces)) break;
        ptx::load_matrix_x4_transposed(b[piece], reader.at(step, n * 16) + piece * right.plane_bytes);
      }
      multiply_block<C>(a, b, pieces, output, 2 * step);
    }
  }
}

// The same for weights that are still float. In pairs, 16-bit ones take half the registers; pieces of float32
// would take more and are made as they are needed.
template <class C, int kTiles>
__device__ __forceinline__ void accumulate(const float (&weights)[C::kStrips][kTiles][4],
                                           const Operand& right, int lane, int dim, int pieces,
                                           float (&output)[C::kStrips][C::kDimTiles][4]) {
  constexpr int kBlocks = kTiles / 2;
  LeftBlock<C> paired[C::kFloat32 ? 1 : kBlocks];
  if constexpr (!C::kFloat32) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) mma::pair_weights<C>(weights, 2 * n, paired[n]);
  }
  const auto block = [&](int n) -> const LeftBlock<C>& {
    if constexpr (C::kFloat32) mma::pair_weights<C>(weights, 2 * n, paired[0]);
    return paired[C::kFloat32 ? 0 : n];
  };
  accumulate_blocks<C, kBlocks>(block, right, lane, dim, pieces, output);
}

}  // namespace selfattn::cuda::sm80
