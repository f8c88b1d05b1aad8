// Decides which calls are computed by pairs; kFusedAvx512 computes all others.
#pragma once

#include "products_of_pairs.h"

#include "../fused/overflow.h"

namespace selfattn::cpu {
extern const Kernel kFusedAvx512;
// Does what mend_overflow does; defined in isa/kernels_avx512.cpp.
void mend_overflow_avx512(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch,
                          int64_t head, int64_t first, int64_t count);
}  // namespace selfattn::cpu

namespace selfattn::cpu::SELFATTN_ISA {

// Overflow is mended in float, and so seldom that all kernels of pairs share the code for it. A strip of
// pairs has no more queries than one of kFusedAvx512, and a row's bits do not depend on its strip.
template <>
inline void mend_overflow<float>(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch,
                                 int64_t head, int64_t first, int64_t count) {
  mend_overflow_avx512(p, outputs, batch, head, first, count);
}
template <>
inline void mend_overflow<double>(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch,
                                  int64_t head, int64_t first, int64_t count) {
  mend_overflow_avx512(p, outputs, batch, head, first, count);
}

// Scales between these bounds, and their inverses, are far inside the range of a float.
constexpr double kLeastScale = 1e-30, kMostScale = 1e30;

// Depends on dtype, precision and shape of one batch element alone, so that all passes of a call decide alike
// and nothing depends on the rest of the batch. With more pieces than kMostPieces, float is faster. The scale
// must be positive, since scores are multiplied by it only after their maximum is taken, and its inverse must
// be a float, since scores are divided by it, too. Calls with ALiBi slopes and one piece are left to float:
// the gradient of the slopes sums dS times distances, and nearly all of it cancels only if O and dS use the
// same weights. One piece would round them for O alone, and terms of far distances would remain.
inline bool multiplies_pairs(const AttentionParams& p) {
  if (p.alibi_slopes.data != nullptr && Pairs::pieces(p) == 1) return false;
  return p.dtype != DType::kFloat64 && Pairs::pieces(p) <= PairEngine::kMostPieces &&
         p.head_dim >= kLeastHeadDim && p.scale > kLeastScale && p.scale < kMostScale;
}

// With few queries, memory is the limit, unless numbers must be converted, so only bfloat16 decodes by pairs.
// The gradients of such calls are computed in float, from scores that differ from these by rounding; with a
// large scale that difference would be too much for an exponential.
constexpr double kMostDecodedScale = 1024.0;

inline bool decodes_pairs(const AttentionParams& p) {
  return p.dtype == DType::kBFloat16 && p.scale <= kMostDecodedScale && multiplies_pairs(p);
}

// Selects the elements of a batch that have least .. most queries each.
inline AttentionParams elements_with(const AttentionParams& p, int64_t least, int64_t most) {
  AttentionParams some = p;
  some.sequences.least_queries = least;
  some.sequences.most_queries = most;
  return some;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
