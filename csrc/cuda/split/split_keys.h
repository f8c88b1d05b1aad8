// How the keys of few-query sequences are cut into splits. Plain C++, for plans and for kernels.
//
// Sequences with few queries ("few-query sequences") have several blocks, each for one split of the keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../core/attention_params.h"
#include "../../core/integers.h"

namespace selfattn::cuda {

// Few-query sequences have at most so many queries. Their time is that of reading keys and values.
constexpr int64_t kFewQueries = 16;

// Whether a sequence with so many queries is computed as one with few. It is not if its rows must have the
// same bits as among many queries.
SELFATTN_HOST_DEVICE inline bool counts_as_few(const AttentionParams& p, int64_t queries) {
  return queries <= kFewQueries && !p.batch_invariant;
}
// Whether all sequences have few queries, and whether some may.
inline bool has_few_queries(const AttentionParams& p) { return counts_as_few(p, p.queries); }
inline bool may_have_few_queries(const AttentionParams& p) {
  return !p.batch_invariant && (has_few_queries(p) || p.sequences.query_starts != nullptr);
}

// How the keys of a few-query sequence are cut.
template <class Index>
struct Splits {
  int count;
  Index keys;  // of each split but the last
};

constexpr unsigned kLeastSplitKeys = 256;  // fewer keys are not worth a block
constexpr unsigned kMostSplits = 64;       // more would make the merge noticeable

// The splits depend only on the number of the sequence's keys, because a row must not depend on its batch,
// nor on the capacity of a cache. Kernels with 32-bit indices use a 32-bit division.
template <class Index>
SELFATTN_HOST_DEVICE inline Splits<Index> splits_of(Index keys) {
  if (keys <= static_cast<Index>(kLeastSplitKeys)) return {1, kLeastSplitKeys};
  const Index least = (keys + (kMostSplits - 1)) / kMostSplits;
  const Index of_split = (least + (kLeastSplitKeys - 1)) / kLeastSplitKeys * kLeastSplitKeys;
  return {static_cast<int>((keys + of_split - 1) / of_split), of_split};
}

// The most splits that any few-query sequence may have. A shorter sequence may have more than the longest.
inline int64_t most_splits(const AttentionParams& p) {
  if (p.sequences.key_starts == nullptr && p.sequences.key_lengths == nullptr) {
    return splits_of(p.keys).count;
  }
  return std::min<int64_t>(kMostSplits, std::max<int64_t>(1, divide_up(p.keys, kLeastSplitKeys)));
}

// The most bytes that splits may leave. Calls that would need more are cut into several launches, each for
// some elements of the batch. Packed calls may, because the host does not know which sequences have few
// queries.
constexpr int64_t kMostPartialBytes = int64_t{256} << 20;

// A launch for few-query sequences: its elements of the batch, and the arrays where splits leave their
// states, [batches][heads][queries][splits] and, for out, another [value_dim]. T is the accumulation type.
template <class T>
struct SplitLaunch {
  int64_t first_batch = 0;
  int64_t batches = 0;
  int64_t queries = 0;  // of the longest few-query sequence; 0 if the launch is for other sequences
  int64_t splits = 1;   // see most_splits

  // These are null if no sequence has more than one split.
  T* max = nullptr;
  T* sum = nullptr;
  T* rounding = nullptr;  // nullable: the sum of the rounded weights minus `sum`
  T* out = nullptr;       // not yet divided by the sum

  // The index of the state of a row's first split.
  SELFATTN_HOST_DEVICE int64_t state(int64_t heads, int64_t batch, int64_t head, int64_t query) const {
    return (((batch - first_batch) * heads + head) * queries + query) * splits;
  }
};

// How many numbers the splits of one element of the batch leave.
template <class T>
int64_t partial_numbers(const AttentionParams& p, const SplitLaunch<T>& launch, bool rounds) {
  if (launch.splits == 1) return 0;
  return p.heads * launch.queries * launch.splits * ((rounds ? 3 : 2) + p.value_dim);
}

// The launch for the first elements of the batch. `rounds` says whether the kernel keeps
// SplitLaunch::rounding.
template <class T>
SplitLaunch<T> first_split_launch(const AttentionParams& p, void* workspace, bool rounds) {
  SplitLaunch<T> launch;
  launch.batches = p.batch;
  launch.queries = std::min(p.queries, kFewQueries);
  launch.splits = most_splits(p);
  const int64_t of_batch = partial_numbers(p, launch, rounds);
  if (of_batch == 0) return launch;
  const int64_t most = kMostPartialBytes / static_cast<int64_t>(sizeof(T));
  launch.batches = std::min(p.batch, std::max<int64_t>(1, most / of_batch));
  const int64_t states = launch.batches * p.heads * launch.queries * launch.splits;
  launch.max = static_cast<T*>(workspace);
  launch.sum = launch.max + states;
  launch.rounding = rounds ? launch.sum + states : nullptr;
  launch.out = launch.sum + (rounds ? 2 : 1) * states;
  return launch;
}

// Moves the launch on to the next elements of the batch. Returns whether there are any.
template <class T>
bool next_split_launch(const AttentionParams& p, SplitLaunch<T>& launch) {
  launch.first_batch += launch.batches;
  if (launch.first_batch >= p.batch) return false;
  launch.batches = std::min(launch.batches, p.batch - launch.first_batch);
  return true;
}

// The bytes of the states.
template <class T>
size_t split_workspace(const AttentionParams& p, bool rounds) {
  if (!may_have_few_queries(p)) return 0;
  const SplitLaunch<T> launch = first_split_launch<T>(p, nullptr, rounds);
  return static_cast<size_t>(launch.batches * partial_numbers(p, launch, rounds)) * sizeof(T);
}

}  // namespace selfattn::cuda
