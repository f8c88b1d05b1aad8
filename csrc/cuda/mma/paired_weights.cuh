// Weights as the left operands of products, two 16-bit numbers in each register.
#pragma once

#include "fragments.cuh"
#include "pieces.cuh"

namespace selfattn::cuda::mma {

template <class C>
using LeftBlock = uint32_t[C::kPieces][C::kStrips][4];  // 16 rows of every strip by 16

// Makes a left operand of columns 8 * tile .. + 15 of the weights. The accumulators of two neighbouring
// products of scores only need to be rounded and paired for that, so that weights never leave the registers.
template <class C, int kTiles>
__device__ __forceinline__ void pair_weights(const float (&weights)[C::kStrips][kTiles][4], int tile,
                                             LeftBlock<C>& a) {
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Registers 0 and 1 hold both rows of the left eight columns, 2 and 3 those of the right.
      const float* pair = &weights[strip][tile + i / 2][i % 2 * 2];
      float low = pair[0], high = pair[1];
      if constexpr (C::kFloat32) {
#pragma unroll
        for (int piece = 0; piece < C::kPieces; ++piece) a[piece][strip][i] = take_piece(low, high);
      } else {
        a[0][strip][i] = Arithmetic<C::kDType>::pack(low, high);
      }
    }
  }
}

// 16-bit weights as left operands of products, see pair_weights. A register pairs the lane's two neighbours
// in a row of eight keys.
template <class C>
struct PairedWeights {
  LeftBlock<C> block[C::kColumnTiles / 2];

  PairedWeights() = default;
  __device__ __forceinline__ explicit PairedWeights(const Scores<C>& weights) {
#pragma unroll
    for (int n = 0; n < C::kColumnTiles / 2; ++n) pair_weights<C>(weights.at, 2 * n, block[n]);
  }
  __device__ __forceinline__ uint32_t& pair(int strip, int half, int tile) {
    return block[tile / 2][0][strip][tile % 2 * 2 + half];
  }
};

}  // namespace selfattn::cuda::mma
