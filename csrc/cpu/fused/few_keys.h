// The forward for very few queries and very few keys: short sequences, the first tokens of a text. The
// products of a head take some dozens of cycles, less than decode.h spends on what to prefetch, on blocks of
// keys and on chunks. So here a head takes one pass. What would wait for its own latency, the softmax of a
// row and its sums over lanes, is done for as many rows at once as a vector has lanes, of whatever heads.
#pragma once

#include "../products/few_query_products.h"
#include "decode_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// So many keys are very few. Beyond, several rows should share what is loaded of a key, as decode.h does it.
constexpr int64_t kFewKeys = 16;

// Multiplies a row of queries by kAtOnce keys at a time, with the bits of few_query_scores.
template <class T, class Stored, int kAtOnce>
void few_key_scores_by(const T* query, const RowRun& keys, const RowTail<T, Stored>& tail, T* scores) {
  using S = Simd<T>;
  const typename Stored::Element* rows[kAtOnce];
  for (int64_t key = 0; key < keys.rows; key += kAtOnce) {
    for (int j = 0; j < kAtOnce; ++j) {  // past the end the last key is repeated
      rows[j] = reinterpret_cast<const typename Stored::Element*>(
          keys.first + smaller(key + j, keys.rows - 1) * keys.step);
    }
    typename S::Vec sums[1][kAtOnce];
    few_query_dots<T, Stored, 1, kAtOnce>(query, 0, rows, rows, 1, tail, sums);
    sum_lanes<T, kAtOnce>(sums[0]);
    auto sum = sums[0][0];
    SELFATTN_UNROLL
    for (int i = kAtOnce; i < S::kWidth; i *= 2) {
      sum = S::add(S::interleave_low(sum, sum), S::interleave_high(sum, sum));
    }
    T lanes[S::kWidth];
    S::store(lanes, sum);
    for (int j = 0; j < kAtOnce && key + j < keys.rows; ++j) scores[key + j] = lanes[j * S::kWidth / kAtOnce];
  }
}

template <class T, class Stored>
SELFATTN_INLINE void few_key_scores(const T* query, const RowRun& keys, const RowTail<T, Stored>& tail,
                                    T* scores) {
  if (keys.rows == 1) {
    few_key_scores_by<T, Stored, 1>(query, keys, tail, scores);
  } else {
    few_key_scores_by<T, Stored, smaller(Simd<T>::kWidth, 4)>(query, keys, tail, scores);
  }
}

template <class T, class Stored>
struct FewKeysTask {
  using S = Simd<T>;

  static constexpr int64_t kBlock = S::kWidth;  // rows that share a softmax
  static constexpr int64_t kItem = 2 * kBlock;  // rows of an item; with fewer, claiming it would show

  const AttentionParams& p;
  const ForwardOutputs& outputs;
  int64_t least, most;  // queries of the batch elements that are computed here
  bool changes_scores;  // by an option between the product and the softmax
  RowTail<T, Stored> key_tail;
  FewQueryColumns<T, Stored> columns;

  FewKeysTask(const AttentionParams& params, const ForwardOutputs& results, int64_t most_queries)
      : p(params),
        outputs(results),
        least(larger(params.sequences.least_queries, 1)),
        most(smaller(params.sequences.most_queries, most_queries)),
        changes_scores(!options_of(p).within({Option::kSinks, Option::kDropout, Option::kPackedQueries,
                                              Option::kPackedKeys, Option::kKeyLengths, Option::kPages})),
        key_tail(params.head_dim),
        columns(params.value_dim) {}

  // Elements that differ in length are an item each.
  int64_t items() const {
    if (!p.sequences.any()) return divide_up(p.batch * p.heads * p.queries, kItem);
    int64_t taken = 0;
    for (int64_t b = 0; b < p.batch; ++b) taken += takes(b);
    return taken > 0 ? p.batch : 0;
  }
  bool takes(int64_t element) const {
    const int64_t queries = queries_of(p, element).count;
    return queries >= least && queries <= most && keys_of(p, element).count <= kFewKeys;
  }

  struct Parts {
    T *query, *out;  // one row, padded

    SELFATTN_OUT_OF_LINE void allocate(const FewKeysTask& t, Arena& arena) {
      query = arena.take<T>(round_up_to_vector<T>(t.p.head_dim));
      out = arena.take<T>(round_up_to_vector<T>(t.p.value_dim));
    }
  };
  using Scratch = WorkerScratch<Parts, typename FewQueryProducts<T>::Session>;

  void operator()(int64_t item, Scratch& s) const {
    if (!p.sequences.any()) {
      const int64_t first = item * kItem, rows = p.batch * p.heads * p.queries;
      return add_rows({p, outputs}, first, smaller(first + kItem, rows), s);
    }
    if (!takes(item)) return;
    const AttentionParams element = element_of(p, item);
    add_rows({element, element_of(outputs, p, item)}, 0, p.heads * element.queries, s);
  }

  // A call, or an element of its batch, which is a call of its own. Its rows are numbered (batch, head,
  // query).
  struct Call {
    const AttentionParams& p;
    const ForwardOutputs& outputs;

    DecodeRow row(int64_t index) const {
      const int64_t head = index / p.queries;
      return {head / p.heads, head % p.heads, index % p.queries};
    }
    // Calls function(rows, key) for the evenly spaced rows of keys, or of values, from each `key` on.
    template <class Function>
    void for_each_run(const View& view, const DecodeRow& at, const Function& function) const {
      RowRun run{};
      for (int64_t key = 0; key < p.keys; key += run.rows) {
        run = key_run(p, view, at.batch, p.kv_head(at.head), key, p.keys - key);
        function(run, key);
      }
    }
  };

  // Rows of scores, which become weights.
  struct Block {
    alignas(64) T scores[kBlock][kFewKeys], visible[kBlock][kFewKeys];
    alignas(64) T row_max[kBlock], row_sum[kBlock], row_top[kBlock], row_mean[kBlock];
  };

  void add_rows(const Call& call, int64_t first, int64_t end, Scratch& s) const {
    Block block;
    for (; first < end; first += kBlock) {
      const int64_t count = smaller(end - first, kBlock);
      for (int64_t r = 0; r < count; ++r) score(call, call.row(first + r), block, r, s);
      softmax(call.p.keys, count, block);
      for (int64_t r = 0; r < count; ++r) finish(call, call.row(first + r), block, r, s);
    }
  }

  // Computes the scores of one row, -inf where hidden and past the last key.
  void score(const Call& call, const DecodeRow& at, Block& block, int64_t r, Scratch& s) const {
    constexpr T kNothing = -std::numeric_limits<T>::infinity();
    T* const scores = block.scores[r];
    for (int64_t j = 0; j < kFewKeys; j += S::kWidth) S::store(scores + j, S::set(kNothing));
    const void* query = element(call.p.query.data, p.dtype, call.p.query.offset(at.batch, at.head, at.query));
    load_padded_row<T>(s.query, query, p.dtype, p.head_dim, static_cast<T>(p.scale));
    call.for_each_run(call.p.key, at, [&](const RowRun& keys, int64_t key) {
      few_key_scores<T, Stored>(s.query, keys, key_tail, scores + key);
    });
    const int64_t keys = call.p.keys;
    if (changes_scores) {
      T bias[kFewKeys];
      const bool masked = p.mask.data != nullptr;
      if (masked) load_mask_row<T>(call.p, at, 0, keys, bias);
      finish_row<T>(call.p, at, 0, keys, masked ? bias : nullptr, scores);
    }
    // What a query does not see takes no part, because 0 * Inf or 0 * NaN would be NaN.
    mark_visible_row<T>(keys, scores, block.visible[r]);
    // An attention sink is a score without a value.
    block.row_max[r] = p.sinks.data != nullptr ? head_scalar<T>(call.p.sinks, at.batch, at.head) : kNothing;
  }

  // Turns scores into unnormalised weights, with a row in each lane.
  void softmax(int64_t keys, int64_t count, Block& block) const {
    const auto nothing = S::set(-std::numeric_limits<T>::infinity());
    for (int64_t r = count; r < kBlock; ++r) {
      block.row_max[r] = T(0);
      for (int64_t j = 0; j < kFewKeys; j += S::kWidth) S::store(block.scores[r] + j, nothing);
    }
    const auto sink = S::load(block.row_max);
    auto top = nothing;
    typename S::Vec s[kFewKeys / kBlock][kBlock];
    for (int64_t b = 0; b * kBlock < keys; ++b) {
      for (int r = 0; r < kBlock; ++r) s[b][r] = S::load(block.scores[r] + b * kBlock);
      transpose<T>(s[b]);
      for (int j = 0; j < kBlock; ++j) top = S::max(s[b][j], top);
    }
    const auto most = S::max(top, sink);
    // If nothing is visible, subtracting -inf would make NaN of -inf scores.
    const auto shift = S::select(S::equal(most, nothing), S::set(T(0)), most);
    auto sum = exp_nonpositive<T>(S::sub(sink, shift));
    auto mean = S::mul(sum, finite_difference<T>(sink, shift));
    const bool has_statistics = outputs.row_mean != nullptr;
    for (int64_t b = 0; b * kBlock < keys; ++b) {
      for (int j = 0; b * kBlock + j < keys && j < kBlock; ++j) {
        const auto difference = finite_difference<T>(s[b][j], shift);
        s[b][j] = exp_nonpositive<T>(S::sub(s[b][j], shift));
        sum = S::add(sum, s[b][j]);
        if (has_statistics) mean = S::fma(s[b][j], difference, mean);
      }
      transpose<T>(s[b]);
      for (int r = 0; r < kBlock; ++r) S::store(block.scores[r] + b * kBlock, s[b][r]);
    }
    S::store(block.row_max, most);
    S::store(block.row_sum, sum);
    S::store(block.row_top, top);
    S::store(block.row_mean, mean);
  }

  // Adds up the values of one row, and stores its results.
  void finish(const Call& call, const DecodeRow& at, Block& block, int64_t r, Scratch& s) const {
    T* const weights = block.scores[r];
    if (p.dropout.enabled) drop_row<T>(call.p.dropout, at, 0, call.p.keys, weights);
    for (int64_t e = 0; e < p.value_dim; e += S::kWidth) S::store(s.out + e, S::set(T(0)));
    const FewQueryValues<T> sums{weights, block.visible[r], kFewKeys, p.value_dim, s.out, 0};
    call.for_each_run(call.p.value, at, [&](const RowRun& values, int64_t key) {
      columns.template add<1>(sums.from(key), 0, {values, values});
    });
    store_query<T>(call.p, call.outputs, at.batch, at.head, at.query,
                   {block.row_max[r], block.row_sum[r], block.row_top[r], block.row_mean[r]}, s.out);
  }
};

template <class T, class Stored>
void few_keys_as(const AttentionParams& p, const ForwardOutputs& outputs, int64_t most_queries,
                 const ThreadPool& pool) {
  const FewKeysTask<T, Stored> task(p, outputs, most_queries);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

// Computes a call, or those elements of its batch that have at most `most_queries` queries and kFewKeys keys.
template <class T>
void few_keys(const AttentionParams& p, const ForwardOutputs& outputs, int64_t most_queries,
              const ThreadPool& pool) {
  if constexpr (sizeof(T) == 4) {
    if (p.dtype == DType::kBFloat16) return few_keys_as<T, StoredBFloat16<T>>(p, outputs, most_queries, pool);
    if (p.dtype == DType::kFloat16) return few_keys_as<T, StoredFloat16<T>>(p, outputs, most_queries, pool);
  }
  few_keys_as<T, StoredAsT<T>>(p, outputs, most_queries, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
