// Applies a score function (core/score_function.h) to a block of scores, and its gradients. Its effect
// depends on the map of blocks, whose blocks are of any size: so a block of scores is divided into parts that
// each lie in blocks of one kind.
#pragma once

#include "mask_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Calls visit(seen, tile, at) for the parts that cover a block of scores; `at` is the index of the part's
// first score in the block. Ends, and returns true, as soon as a visit returns true.
template <class P, class Visit>
bool for_each_part(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                   const Visit& visit) {
  constexpr int64_t ld = kLanes<P>;
  const BlockMap& map = function.map;
  ScoreTile tile{function.first_batch + strip.batch, strip.head, strip.first, strip.count, key, keys, ld};
  if (map.blocks == nullptr) return visit(Seen::kFunctionDecides, tile, 0);
  const int64_t end_query = strip.first + strip.count, end_key = key + keys;
  for (int64_t query = strip.first, next_query; query < end_query; query = next_query) {
    const int64_t query_block = query / map.query_size;
    next_query = smaller((query_block + 1) * map.query_size, end_query);
    const uint8_t* row = row_of_blocks(map, strip.batch, strip.head, query_block);
    tile.first_query = query;
    tile.queries = next_query - query;
    for (int64_t first = key, next; first < end_key; first = next) {
      int64_t key_block = first / map.key_size;
      const Seen seen = seen_in_block(map, row, key_block);
      do {
        next = smaller(++key_block * map.key_size, end_key);
      } while (next < end_key && seen_in_block(map, row, key_block) == seen);
      tile.first_key = first;
      tile.keys = next - first;
      if (visit(seen, tile, (first - key) * ld + query - strip.first)) return true;
    }
  }
  return false;
}

// Tells whether the map shows anything of a block.
template <class P>
bool map_shows_block(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t key, int64_t keys) {
  return for_each_part(function, strip, key, keys,
                       [](Seen seen, const ScoreTile&, int64_t) { return seen != Seen::kNone; });
}

// Tells whether the function changes a score of a block, or may hide one.
template <class P>
bool alters_block(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t key, int64_t keys) {
  const ScoreFunctionTable* table = function.table;
  return for_each_part(function, strip, key, keys, [&](Seen seen, const ScoreTile&, int64_t) {
    if (seen == Seen::kAll) return table != nullptr && table->apply_unmasked != nullptr;
    return seen == Seen::kNone || (table != nullptr && table->apply != nullptr);
  });
}

// Applies the function to scores s[j][lane]. Lanes past the last query keep theirs. Returns whether any score
// has become the NaN of beside_bits.
template <class P>
bool apply_function(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                    Scalar<P>* s) {
  using T = Scalar<P>;
  int32_t beside = 0;
  FunctionInputs inputs = function.inputs;
  inputs.out_of_range = &beside;
  for_each_part(function, strip, key, keys, [&](Seen seen, const ScoreTile& tile, int64_t at) {
    if (seen == Seen::kNone) {
      for (int64_t j = 0; j < tile.keys; ++j) {
        for (int64_t i = 0; i < tile.queries; ++i) {
          s[at + j * tile.stride + i] = -std::numeric_limits<T>::infinity();
        }
      }
    } else if (function.table != nullptr) {
      const auto apply = seen == Seen::kAll ? function.table->apply_unmasked : function.table->apply;
      if (apply != nullptr) apply(&inputs, &tile, s + at);
    }
    return false;
  });
  return beside != 0;
}

// Sets FunctionInputs::out_of_range if that NaN is left among final scores, where nothing has hidden it.
template <class P>
void note_beside(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t keys,
                 const Scalar<P>* s) {
  constexpr auto kBits = beside_bits(Scalar<P>());
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < strip.count; ++i) {
      auto bits = kBits;
      memcpy(&bits, s + j * kLanes<P> + i, sizeof(bits));
      if (bits == kBits) __atomic_store_n(function.inputs.out_of_range, 1, __ATOMIC_RELAXED);
    }
  }
}

// Turns dS with respect to what apply_function made of `scores` into dS with respect to `scores`, in place.
// dS of hidden scores is 0 and stays so.
template <class P>
void apply_function_gradient(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t key,
                             int64_t keys, const Scalar<P>* scores, Scalar<P>* grad) {
  if (function.table == nullptr || function.table->differentiate == nullptr) return;
  for_each_part(function, strip, key, keys, [&](Seen seen, const ScoreTile& tile, int64_t at) {
    if (seen != Seen::kNone) {
      function.table->differentiate(&function.inputs, &tile, scores + at, grad + at);
    }
    return false;
  });
}

// Adds a block's contribution to the gradients of captured tensors: ScoreFunctionTable::add_captured.
template <class P>
void add_captured_gradients(const ScoreFunction& function, const QueryStrip<P>& strip, int64_t key,
                            int64_t keys, const Scalar<P>* scores, const Scalar<P>* grad,
                            double* const* sums) {
  for_each_part(function, strip, key, keys, [&](Seen seen, const ScoreTile& tile, int64_t at) {
    if (seen != Seen::kNone) {
      function.table->add_captured(&function.inputs, &tile, scores + at, grad + at, sums);
    }
    return false;
  });
}

}  // namespace selfattn::cpu::SELFATTN_ISA
