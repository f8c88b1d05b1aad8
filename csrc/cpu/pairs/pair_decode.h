// Decoding by pairs: the calls with few queries of pair_kernel.h. A kernels_*.cpp includes this file after
// decode_by_vectors.h and, for tiles, decode_by_tiles.h.
#pragma once

#include "pair_passes.h"

#include "../fused/decode.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
void decode_all(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  p.sequences.any() ? decode_sequences<P>(p, o, pool) : decode<P>(p, o, pool);
}

// Tiles gain nothing for a single row, and loading tiles waits where loading vectors does not. Measured, from
// memory: 73 % of the read bandwidth with tiles and 85 % with vectors for one row, as much for two, and 74
// and 65 % for four.
constexpr int64_t kVectorRows = 2;

template <class Engine = PairEngine>
void decode_pairs(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  if constexpr (Engine::kTiles) {
    const int64_t few = kVectorRows / (p.heads / p.kv_heads);  // queries with so few rows per kv head
    if (p.queries <= few) return decode_all<VectorPairs>(p, o, pool);
    if (few == 0 || !p.sequences.any()) return decode_all<TilePairs>(p, o, pool);
    decode_all<VectorPairs>(elements_with(p, 0, few), o, pool);
    decode_all<TilePairs>(elements_with(p, few + 1, most_decoded(p)), o, pool);
  } else {
    decode_all<VectorPairs>(p, o, pool);
  }
}

// A template, so that the branch that is not taken is not compiled.
template <class Engine = PairEngine>
void decode_or_hand_on(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  if (decodes_pairs(p)) return decode_pairs(p, o, pool);
  if constexpr (Engine::kDecodesDirect) {
    return p.dtype == DType::kFloat64 ? decode_all<double>(p, o, pool) : decode_all<float>(p, o, pool);
  } else {
    kFusedAvx512.forward(p, o, pool);
  }
}

void pair_decode(const AttentionParams& p, const ForwardOutputs& o, const ThreadPool& pool) {
  decode_or_hand_on(p, o, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
