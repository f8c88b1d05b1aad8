// Which calls an instruction set that multiplies pairs takes, and the kernel that has all others.
#pragma once

#include "products_of_pairs.h"

namespace selfattn::cpu {
extern const Kernel kFusedAvx512;
}

namespace selfattn::cpu::SELFATTN_ISA {

// Far within what floats are, and so are the inverses.
constexpr double kLeastScale = 1e-30, kMostScale = 1e30;

// Decided by dtype, precision and shape of one batch element alone, so that all passes of a call decide alike
// and nothing depends on the batch. With more pieces than the engine has an advantage for, float is faster; a
// factor of the scores that is not positive cannot wait until after their maximum, and one is divided by,
// too, so its inverse must be a float. The gradient of ALiBi slopes is a sum of dS times distances in which
// nearly all cancels, if only the weights in O and in dS are the same numbers: rounding them for O alone
// would leave far distances standing.
inline bool multiplies_pairs(const AttentionParams& p) {
  if (p.alibi_slopes.data != nullptr && Pairs::pieces(p) == 1) return false;
  return p.dtype != DType::kFloat64 && Pairs::pieces(p) <= PairEngine::kMostPieces &&
         p.head_dim >= kLeastHeadDim && p.scale > kLeastScale && p.scale < kMostScale;
}

// With a few queries memory is the limit, unless numbers must be converted. Their gradient is computed in
// float: its scores differ from those here by rounding, which a large scale makes more than exponents hold.
constexpr double kMostDecodedScale = 1024.0;

inline bool decodes_pairs(const AttentionParams& p) {
  return p.dtype == DType::kBFloat16 && p.scale <= kMostDecodedScale && multiplies_pairs(p);
}

// Of a batch whose elements have their own numbers of queries, those with least .. most.
inline AttentionParams elements_with(const AttentionParams& p, int64_t least, int64_t most) {
  AttentionParams some = p;
  some.sequences.least_queries = least;
  some.sequences.most_queries = most;
  return some;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
