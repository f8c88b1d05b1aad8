// Each key's sum of weights where there are very few queries, as in generating text. It works as
// few_query_backward.h does: keys are read where they lie, once for all rows of queries that share a kv head.
//
// An item is a chunk of the keys of one kv head, with all rows that reach them, so that every sum is its own.
#pragma once

#include "../products/few_query_scores.h"
#include "../products/key_rows.h"
#include "few_query_backward.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The options that it applies. Dropout comes after what it sums up.
constexpr OptionSet kFewQueryKeySumsOptions = kFewQueryBackwardOptions.with({Option::kPages});

// Returns the most queries of a call, or of an element of its batch, that is computed here; -1 if none is.
inline int64_t most_in_key_sums(const AttentionParams& p) {
  return options_of(p).within(kFewQueryKeySumsOptions) && scale_keeps_queries(p.scale) ? most_few_queries(p)
                                                                                       : -1;
}

template <class T>
struct FewQueryKeySumsTask {
  using S = Simd<T>;

  static constexpr int64_t kBlock = 128;  // keys of a block of scores
  static constexpr int64_t kChunk = 512;  // keys of an item

  const AttentionParams& p;
  const WeightSums& sums;
  int64_t group, chunks, rows;  // rows of queries of an item
  int64_t query_stride;         // padded row length

  FewQueryKeySumsTask(const AttentionParams& params, const WeightSums& results)
      : p(params),
        sums(results),
        group(p.heads / p.kv_heads),
        chunks(divide_up(p.keys, kChunk)),
        rows(group * p.queries),
        query_stride(round_up_to_vector<T>(p.head_dim)) {}

  int64_t items() const { return p.batch * p.kv_heads * chunks; }

  struct Parts {
    T *query, *weights, *bias;  // [rows][query_stride], [rows][kBlock], [kBlock] of one row
    T* total;                   // [kBlock] of one head

    SELFATTN_OUT_OF_LINE void allocate(const FewQueryKeySumsTask& t, Arena& arena) {
      query = arena.take<T>(t.rows * t.query_stride);
      weights = arena.take<T>(t.rows * kBlock);
      for (T** of_one : {&bias, &total}) *of_one = arena.take<T>(kBlock);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t number, Scratch& s) const {
    s.lay_out(*this);
    const int64_t head = number / chunks, first = number % chunks * kChunk;
    const int64_t batch = head / p.kv_heads, kv_head = head % p.kv_heads;
    const auto row = [&](int64_t r) {
      return DecodeRow{batch, kv_head * group + r / p.queries, r % p.queries};
    };
    for (int64_t r = 0; r < rows; ++r) {
      const DecodeRow at = row(r);
      const void* query = element(p.query.data, p.dtype, p.query.offset(at.batch, at.head, at.query));
      load_padded_row<T>(s.query + r * query_stride, query, p.dtype, p.head_dim, static_cast<T>(p.scale));
    }
    const int64_t end = smaller(first + kChunk, p.keys);
    for (int64_t key = first, count; key < end; key += count) {
      const RowRun run = key_run(p, p.key, batch, kv_head, key, smaller(end - key, kBlock));
      count = run.rows;
      const EvenRows keys(p.dtype, run.first, count, run.step, p.head_dim * size_of(p.dtype));
      few_query_scores<T>(s.query, rows, keys.rows(), p.head_dim, s.weights, kBlock, 1);
      for (int64_t i = 0; i < group; ++i) {
        for (int64_t j = 0; j < kBlock; j += S::kWidth) S::store(s.total + j, S::set(T(0)));
        for (int64_t r = i * p.queries; r < (i + 1) * p.queries; ++r) add_row(row(r), r, key, count, s);
        T* const to = static_cast<T*>(sums.of_keys) + p.key_place(batch, kv_head * group + i, key);
        std::copy(s.total, s.total + count, to);
      }
    }
  }

 private:
  // Turns a row's dot products into weights and adds them to the head's sums, up to a whole vector.
  void add_row(const DecodeRow& at, int64_t r, int64_t key, int64_t keys, Scratch& s) const {
    T* const scores = s.weights + r * kBlock;
    const bool masked = p.mask.data != nullptr;
    if (masked) load_mask_row<T>(p, at, key, keys, s.bias);
    finish_row<T>(p, at, key, keys, masked ? s.bias : nullptr, scores);
    const int64_t index = p.row(at.batch, at.head, at.query);
    const T most = static_cast<const T*>(sums.row_max)[index];
    const T sum = static_cast<const T*>(sums.row_sum)[index];
    const auto shift = S::set(most == -std::numeric_limits<T>::infinity() ? T(0) : most);
    const auto inverse = S::set(sum == T(0) ? T(0) : T(1) / sum);
    for (int64_t j = 0; j < keys; j += S::kWidth) {
      const auto weight = normalised_weight<T>(S::load(scores + j), shift, inverse);
      S::store(s.total + j, S::add(S::load(s.total + j), weight));
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
