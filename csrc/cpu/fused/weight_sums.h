// Sums of the softmax weights, from the forward's statistics: what each key received from all queries, and
// each query's weights times a number per key. Scores are computed again; a matrix of them is in no memory.
//
// An item owns its results and adds to them in the order of queries, or of keys, so that they do not depend
// on the threads.
#pragma once

#include "../products/key_rows.h"
#include "few_query_key_sums.h"
#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A strip of queries with its weights of one block of keys, before dropout.
template <class P>
struct WeightStrip {
  using T = Scalar<P>;

  BlockScratch<P> block;
  QueryStrip<P> strip;
  RowOperand<P> keys;
  T *weights, *row_max, *inverse_sum;  // weights: [kKeyBlock][kLanes]
  bool ordinary;                       // whether inverse_sum holds no NaN
  char* paged_keys;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, int64_t most_keys, Arena& arena) {
    block.allocate(p, false, arena);
    strip.allocate(p, arena);
    keys.allocate(p, most_keys, p.head_dim, arena);
    weights = arena.take<T>(kKeyBlock * kLanes<P>);
    row_max = arena.take<T>(kLanes<P>);
    inverse_sum = arena.take<T>(kLanes<P>);
    paged_keys = arena.take<char>(block_bytes(p, most_keys, p.head_dim));
  }
  void load_keys(const AttentionParams& p, int64_t batch, int64_t head, int64_t first, int64_t count) {
    keys.load(key_source(p, p.key, batch, p.kv_head(head), first, count, p.head_dim, paged_keys));
  }
  SELFATTN_OUT_OF_LINE void begin(const AttentionParams& p, const WeightSums& sums, int64_t batch,
                                  int64_t head, int64_t first, int64_t count) {
    strip.begin(p, batch, head, first, count);
    const int64_t row = p.row(batch, head, first);
    const T* maxima = static_cast<const T*>(sums.row_max) + row;
    const T* of_rows = static_cast<const T*>(sums.row_sum) + row;
    ordinary = true;
    for (int64_t lane = 0; lane < kLanes<P>; ++lane) {
      const bool past_last = lane >= count;
      const bool nothing = past_last || maxima[lane] == -std::numeric_limits<T>::infinity();
      row_max[lane] = nothing ? T(0) : maxima[lane];
      inverse_sum[lane] = past_last || of_rows[lane] == T(0) ? T(0) : T(1) / of_rows[lane];
      ordinary &= inverse_sum[lane] == inverse_sum[lane];
    }
  }
  // Computes the weights of keys first .. first + count - 1, which are the loaded rows from `from` on.
  // Returns false if all of them are hidden. Lanes past the last query have weights of 0.
  bool weigh(const AttentionParams& p, int64_t first, int64_t count, int64_t from) {
    if (first >= strip.keys.end || first + count <= strip.keys.begin) return false;
    T factor;
    if (!score_block<P>(p, strip, first, count, keys, from, block, weights, &factor)) return false;
    normalise_block<P>(p, strip, count, row_max, inverse_sum, factor, !ordinary, weights);
    clear_past_last<P>(strip, count, weights);
    return true;
  }
};

// Adds up each key's weights. An item is a chunk of the keys of one head.
template <class P>
struct KeySumsTask {
  using T = Scalar<P>;
  using S = Simd<T>;

  static constexpr int64_t kChunk = 8 * kKeyBlock;
  // Strips after which the sums, one for each lane, go to a sum in double.
  static constexpr int64_t kStrips = 16;

  const AttentionParams& p;
  const WeightSums& sums;
  int64_t chunks;

  KeySumsTask(const AttentionParams& params, const WeightSums& results)
      : p(params), sums(results), chunks(divide_up(params.keys, kChunk)) {}
  int64_t items() const { return p.batch * p.heads * chunks; }

  struct Parts : WeightStrip<P> {
    T* of_lanes;    // [kChunk][kWidth]
    double* total;  // [kChunk]

    SELFATTN_OUT_OF_LINE void allocate(const KeySumsTask& task, Arena& arena) {
      WeightStrip<P>::allocate(task.p, kChunk, arena);
      of_lanes = arena.take<T>(kChunk * S::kWidth);
      total = arena.take<double>(kChunk);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    const int64_t head_index = item / chunks, first_key = item % chunks * kChunk;
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t keys = smaller(p.keys - first_key, kChunk);
    s.load_keys(p, batch, head, first_key, keys);
    for (int64_t j = 0; j < keys; ++j) s.total[j] = 0;
    clear(s, keys);
    int64_t strips = 0;
    for (int64_t query = 0; query < p.queries; query += kLanes<P>) {
      const int64_t count = smaller(p.queries - query, kLanes<P>);
      const KeyRange seen = visible_keys(p, query, query + count - 1);
      if (seen.begin >= first_key + keys || seen.end <= first_key) continue;
      if (strips++ == kStrips) {
        flush(s, keys);
        strips = 1;
      }
      s.begin(p, sums, batch, head, query, count);
      for (int64_t from = 0; from < keys; from += kKeyBlock) {
        const int64_t rows = smaller(keys - from, kKeyBlock);
        if (s.weigh(p, first_key + from, rows, from)) add_block(s, from, rows);
      }
    }
    flush(s, keys);
    T* const to = static_cast<T*>(sums.of_keys) + p.key_place(batch, head, first_key);
    for (int64_t j = 0; j < keys; ++j) to[j] = static_cast<T>(s.total[j]);
  }

 private:
  static void clear(Scratch& s, int64_t keys) {
    memset(s.of_lanes, 0, static_cast<size_t>(keys * S::kWidth) * sizeof(T));
  }
  static void add_block(Scratch& s, int64_t from, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      T* const to = s.of_lanes + (from + j) * S::kWidth;
      const T* const weights = s.weights + j * kLanes<P>;
      auto sum = S::load(weights);
      for (int64_t v = 1; v < s.strip.vecs; ++v) sum = S::add(sum, S::load(weights + v * S::kWidth));
      S::store(to, S::add(S::load(to), sum));
    }
  }
  static void flush(Scratch& s, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      double sum = 0;
      for (int i = 0; i < S::kWidth; ++i) sum += static_cast<double>(s.of_lanes[j * S::kWidth + i]);
      s.total[j] += sum;
    }
    clear(s, keys);
  }
};

// Adds up each query's weights times the keys' numbers. An item is a strip.
template <class P>
struct QuerySumsTask {
  using T = Scalar<P>;
  using S = Simd<T>;

  const AttentionParams& p;
  const WeightSums& sums;
  int64_t strips_per_head;

  QuerySumsTask(const AttentionParams& params, const WeightSums& results)
      : p(params), sums(results), strips_per_head(divide_up(params.queries, kLanes<P>)) {}
  int64_t items() const { return p.batch * p.heads * strips_per_head; }

  struct Parts : WeightStrip<P> {
    T* total;  // [kLanes]

    SELFATTN_OUT_OF_LINE void allocate(const QuerySumsTask& task, Arena& arena) {
      WeightStrip<P>::allocate(task.p, kKeyBlock, arena);
      total = arena.take<T>(kLanes<P>);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    const int64_t head_index = item / strips_per_head, first = item % strips_per_head * kLanes<P>;
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t count = smaller(p.queries - first, kLanes<P>);
    s.begin(p, sums, batch, head, first, count);
    memset(s.total, 0, static_cast<size_t>(kLanes<P>) * sizeof(T));
    const T* const per_key = static_cast<const T*>(sums.per_key) + p.key_place(batch, head, 0);
    for (int64_t key = s.strip.keys.begin / kKeyBlock * kKeyBlock; key < s.strip.keys.end; key += kKeyBlock) {
      const int64_t keys = smaller(p.keys - key, kKeyBlock);
      s.load_keys(p, batch, head, key, keys);
      if (!s.weigh(p, key, keys, 0)) continue;
      for (int64_t lane = 0; lane < s.strip.vecs * S::kWidth; lane += S::kWidth) {
        const auto sum = of_block(s.weights + lane, per_key + key, keys);
        S::store(s.total + lane, S::add(S::load(s.total + lane), sum));
      }
    }
    T* const to = static_cast<T*>(sums.of_queries) + p.row(batch, head, first);
    std::copy(s.total, s.total + count, to);
  }

 private:
  // A weight of 0 adds nothing, even if the key's number is not finite.
  static typename S::Vec of_block(const T* weights, const T* numbers, int64_t keys) {
    const auto zero = S::set(T(0));
    typename S::Vec parts[2] = {zero, zero};
    for (int64_t j = 0; j < keys; ++j) {
      const auto weight = S::load(weights + j * kLanes<P>);
      const auto sum = S::fma(weight, S::set(numbers[j]), parts[j % 2]);
      parts[j % 2] = S::select(S::equal(weight, zero), parts[j % 2], sum);
    }
    return S::add(parts[0], parts[1]);
  }
};

// Runs a task for a call, or for those elements of its batch that have least .. most queries.
template <class Task>
void sum_weights(const AttentionParams& p, const WeightSums& sums, const ThreadPool& pool, int64_t least = 0,
                 int64_t most = kAnyQueries) {
  if (p.sequences.any()) {
    const auto calls = element_calls(p, sums, least, most);
    const auto joint = joint_task<Task>(calls);
    return for_each_item(pool, joint.items(), joint, Items::kIndependent);
  }
  if (p.queries < least || p.queries > most) return;
  const Task task(p, sums);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

template <class P>
void weight_sums_pass(const AttentionParams& p, const WeightSums& sums, const ThreadPool& pool) {
  if (sums.of_queries != nullptr) return sum_weights<QuerySumsTask<P>>(p, sums, pool);
  int64_t few = -1;
  if constexpr (kDirect<P>) {
    few = most_in_key_sums(p);
    sum_weights<FewQueryKeySumsTask<P>>(p, sums, pool, 0, few);
  }
  sum_weights<KeySumsTask<P>>(p, sums, pool, few + 1);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
