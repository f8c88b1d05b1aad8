// The entry points of an instruction set that multiplies pairs, for the calls that gain by it; all others go
// to the kernel for plain AVX-512. Included last in a kernels_*.cpp, after what decodes by pairs there:
// thin_pairs.h or thin_tiles.h.
#pragma once

#include "pair_products.h"

#include "pair_gradients.h"

#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "weights.h"

namespace selfattn::cpu {
extern const Kernel kFusedAvx512;
}

namespace selfattn::cpu::SELFATTN_ISA {

// Decided by dtype, precision and shape alone, so that all passes of a call decide alike. With more pieces
// than the engine has an advantage for, float is faster; a factor of the scores that is not positive cannot
// wait until after their maximum. The gradient of ALiBi slopes is a sum of dS times distances in which nearly
// all cancels, if only the weights in O and in dS are the same numbers: rounding them for O alone would leave
// far distances standing.
inline bool gains_by_pairs(const AttentionParams& p) {
  if (p.alibi_slopes.data != nullptr && Pairs::pieces(p) == 1) return false;
  return p.dtype != DType::kFloat64 && Pairs::pieces(p) <= PairEngine::kMostPieces &&
         p.head_dim >= kLeastHeadDim && p.scale > 0.0;
}
inline bool takes_pairs(const AttentionParams& p) { return gains_by_pairs(p) && p.queries > kThinQueries; }

// With a few queries memory is the limit, unless numbers must be converted.
inline bool decodes_pairs(const AttentionParams& p) {
  return p.dtype == DType::kBFloat16 && gains_by_pairs(p);
}

// Of a batch whose elements have their own numbers of queries, what attention_forward leaves over: those with
// few.
inline AttentionParams left_over(const AttentionParams& p) {
  AttentionParams few = p;
  few.sequences.most_queries = kThinQueries;
  return few;
}

template <class P>
void decode_all(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  p.sequences.any() ? decode_sequences<P>(p, o, pool) : decode<P>(p, o, pool);
}

// A template, so that what is handed on is not compiled either.
template <class Engine = PairEngine>
void pair_decode(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  if (decodes_pairs(p)) return decode_all<Pairs>(p, o, pool);
  if constexpr (Engine::kDecodesPlain) {
    return p.dtype == DType::kFloat64 ? decode_all<double>(p, o, pool) : decode_all<float>(p, o, pool);
  } else {
    kFusedAvx512.forward(p, o, pool);
  }
}

inline void pair_forward(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  if (!takes_pairs(p))
    return p.queries <= kThinQueries ? pair_decode(p, o, pool) : kFusedAvx512.forward(p, o, pool);
  attention_forward<Pairs>(p, o, pool);
  if (p.sequences.any()) pair_decode(left_over(p), o, pool);
}
inline void pair_weights(const AttentionParams& p, const WeightsOutputs& o, const ThreadPool& pool) {
  if (!takes_pairs(p)) return kFusedAvx512.weights(p, o, pool);
  attention_weights<Pairs>(p, o, pool);
  if (p.sequences.any()) kFusedAvx512.weights(left_over(p), o, pool);
}
// One kernel after the other, each with the whole of it.
inline size_t pair_backward_workspace(const AttentionParams& p) {
  if (!takes_pairs(p)) return kFusedAvx512.backward_workspace(p);
  size_t bytes = backward_workspace<Pairs>(p);
  if (p.sequences.any()) bytes = std::max(bytes, kFusedAvx512.backward_workspace(left_over(p)));
  return bytes;
}
inline void pair_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  if (!takes_pairs(p)) return kFusedAvx512.backward(p, a, pool);
  attention_backward<Pairs>(p, a, pool);
  if (p.sequences.any()) kFusedAvx512.backward(left_over(p), a, pool);
}
inline void pair_scores(const ScoresParams& p, const ThreadPool& pool) { kFusedAvx512.scores(p, pool); }
inline void pair_scores_backward(const ScoresParams& p, const ThreadPool& pool) {
  kFusedAvx512.scores_backward(p, pool);
}
inline void pair_masked_softmax(const SoftmaxParams& p, const ThreadPool& pool) {
  kFusedAvx512.masked_softmax(p, pool);
}
inline void pair_masked_softmax_backward(const SoftmaxParams& p, const ThreadPool& pool) {
  kFusedAvx512.masked_softmax_backward(p, pool);
}

inline const Kernel* pair_hands_on_to(const AttentionParams& p) {
  const bool decodes = p.queries <= kThinQueries && (PairEngine::kDecodesPlain || decodes_pairs(p));
  return takes_pairs(p) || decodes ? nullptr : &kFusedAvx512;
}

constexpr Kernel pair_kernel(const char* isa, const char* description) {
  return {"fused",
          isa,
          description,
          true,
          pair_forward,
          pair_weights,
          pair_backward_workspace,
          pair_backward,
          pair_scores,
          pair_scores_backward,
          pair_masked_softmax,
          pair_masked_softmax_backward,
          pair_hands_on_to,
          true};
}

}  // namespace selfattn::cpu::SELFATTN_ISA
