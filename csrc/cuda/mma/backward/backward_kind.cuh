// The sides of the backward, and which operands each of them multiplies and sums up.
#pragma once

#include "../warp_tiles.cuh"

namespace selfattn::cuda::mma::backward {

// A block owns a tile of rows, and tiles of columns pass by. What the rows are decides what it sums up.
enum class Side {
  kQuery,     // queries own, keys pass: dQ
  kKeyValue,  // keys own, the queries of all heads of their group pass: dK and dV
  kKey,       // dK alone, where registers do not hold both
  kValue,     // dV alone
  kMask,      // queries own, keys pass, for one mask tile after another: the mask's gradient
};

// "qk" is the pair of operands whose products are the scores, Q and K: they have the head dim, and summed up
// with the gradients of the scores they give dK and dQ. "vo" is the pair whose products are the gradients of
// the weights, V and dO: they have the value dim, and dO summed up with the weights gives dV. Of each pair
// the block owns one operand, and the other passes.
//
// Paths are the forward's, without the one for few queries.
//
// kCareful: NaN and Inf are looked for, and kept from the rows that they are hidden from. float32 always
// looks; 16-bit types compute a tile again with small fragments, which leave room for the code, if its
// results are not finite.
template <class K, Side kSideOf, bool kCarefulOf>
struct BackwardKind : K {
  static constexpr Side kSide = kSideOf;
  static constexpr bool kCareful = kCarefulOf;
  static constexpr bool kOwnsQueries = kSide == Side::kQuery || kSide == Side::kMask;
  static constexpr bool kSumsQK = kSide == Side::kQuery || kSide == Side::kKeyValue || kSide == Side::kKey;
  static constexpr bool kSumsVO = kSide == Side::kKeyValue || kSide == Side::kValue;
  // Whether the products of vo are asked for: dV needs the weights alone, not their gradients dP.
  static constexpr bool kNeedsDP = kSide != Side::kValue;
};

}  // namespace selfattn::cuda::mma::backward
