// The backward for very few queries and very few keys. It has the bits of few_query_backward.h, without its
// chunks, blocks and prefetching, which take longer than such a head's products. Hidden keys are left out
// from the start, as that costs little here, so that nothing is computed twice.
#pragma once

#include "few_keys.h"
#include "few_query_backward.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The options that it applies. What others need between the products is in few_query_backward.h.
constexpr OptionSet kFewKeysBackwardOptions = {
    Option::kMask,       Option::kOwnMasks,    Option::kSinks,
    Option::kWindow,     Option::kQueryOffset, Option::kPackedQueries,
    Option::kPackedKeys, Option::kKeyLengths,  Option::kQueryOffsets};

// Whether a call's elements with few queries and at most kFewKeys keys are computed here.
inline bool takes_few_keys(const AttentionParams& p, const BackwardArguments& a) {
  return options_of(p).within(kFewKeysBackwardOptions) && a.grad_weights.data == nullptr &&
         a.grad_mask.data == nullptr && !has_gradients_of_statistics(a);
}

// Whether the rows of a kv head meet so few keys that it does not pay to have them share what is loaded of a
// key. Sequences of different lengths save more than that by the way through here.
inline bool has_few_pairs(const AttentionParams& p) {
  constexpr int64_t kFewPairs = 24;
  return p.keys <= kFewKeys && p.heads / p.kv_heads * p.queries * p.keys <= kFewPairs;
}

template <class T, class Stored>
struct FewKeysBackwardTask {
  using S = Simd<T>;

  static constexpr int64_t kItem = 16;  // rows of queries of an item; with fewer, claiming it would show

  const AttentionParams& p;
  const BackwardArguments& a;
  int64_t least, most;              // queries of the batch elements that are computed here
  int64_t group, item_heads, rows;  // the most rows of a kv head
  int64_t query_stride, value_stride;
  RowTail<T, Stored> key_tail, value_tail;
  FewQueryColumns<T, Stored> columns;

  FewKeysBackwardTask(const AttentionParams& params, const BackwardArguments& arguments, int64_t most_queries)
      : p(params),
        a(arguments),
        least(params.sequences.least_queries),
        most(smaller(params.sequences.most_queries, most_queries)),
        group(params.heads / params.kv_heads),
        item_heads(larger(kItem / larger(group * params.queries, 1), 1)),
        rows(group * smaller(params.queries, most_queries)),
        query_stride(round_up_to_vector<T>(params.head_dim)),
        value_stride(round_up_to_vector<T>(params.value_dim)),
        key_tail(params.head_dim),
        value_tail(params.value_dim),
        columns(params.head_dim) {}

  // Elements that differ in length are an item each.
  int64_t items() const { return p.sequences.any() ? p.batch : divide_up(p.batch * p.kv_heads, item_heads); }

  struct Parts {
    T *query, *grad_out;                 // [rows][padded], the queries times the scale
    T *out, *residual, *sums;            // one row, padded
    T *weights, *grad, *visible, *bias;  // [rows][kFewKeys], bias of one row

    SELFATTN_OUT_OF_LINE void allocate(const FewKeysBackwardTask& t, Arena& arena) {
      query = arena.take<T>(t.rows * t.query_stride);
      grad_out = arena.take<T>(t.rows * t.value_stride);
      for (T** of_one : {&out, &residual}) *of_one = arena.take<T>(t.value_stride);
      sums = arena.take<T>(t.query_stride);
      for (T** of_rows : {&weights, &grad, &visible}) *of_rows = arena.take<T>(t.rows * kFewKeys);
      bias = arena.take<T>(kFewKeys);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t item, Scratch& s) const {
    if (!p.sequences.any()) {
      const int64_t first = item * item_heads, end = smaller(first + item_heads, p.batch * p.kv_heads);
      for (int64_t head = first; head < end; ++head)
        add_head({p, a}, head / p.kv_heads, head % p.kv_heads, s);
      return;
    }
    const int64_t queries = queries_of(p, item).count;
    if (queries < least || queries > most || keys_of(p, item).count > kFewKeys) return;
    const AttentionParams element = element_of(p, item);
    const BackwardArguments arguments = element_of(a, p, item);
    for (int64_t head = 0; head < p.kv_heads; ++head) add_head({element, arguments}, 0, head, s);
  }

  // A call, or an element of its batch, which is a call of its own.
  struct Call {
    const AttentionParams& p;
    const BackwardArguments& a;

    RowRun keys_of(const View& view, int64_t batch, int64_t kv_head) const {
      return key_run(p, view, batch, kv_head, 0, p.keys);
    }
  };

  void add_head(const Call& call, int64_t batch, int64_t kv_head, Scratch& s) const {
    const int64_t count = group * call.p.queries;
    for (int64_t r = 0; r < count; ++r) {
      add_row(call, {batch, kv_head * group + r / call.p.queries, r % call.p.queries}, kv_head, r, s);
    }
    const auto store = [&](const T* weights, const T* of_rows, int64_t stride, const View& view,
                           int64_t result_columns) {
      const OuterResult result{element(view.data, p.dtype, view.offset(batch, kv_head, 0)), p.dtype,
                               view.stride[2], result_columns};
      few_query_outer_as<T, Stored>({weights, s.visible, kFewKeys, of_rows, count, stride}, call.p.keys,
                                    result);
    };
    store(s.weights, s.grad_out, value_stride, call.a.grad_value, p.value_dim);
    store(s.grad, s.query, query_stride, call.a.grad_key, p.head_dim);
  }

  // Computes a row's weights and dS, and stores its dQ.
  void add_row(const Call& call, const DecodeRow& at, int64_t kv_head, int64_t r, Scratch& s) const {
    T* const query = s.query + r * query_stride;
    T* const grad_out = s.grad_out + r * value_stride;
    const GradientRow<T> row =
        load_gradient_row<T>(call.p, call.a, at, true, query, grad_out, s.out, s.residual);
    T *const weights = s.weights + r * kFewKeys, *const grad = s.grad + r * kFewKeys;
    const auto zero = S::set(T(0)), hidden = S::set(-std::numeric_limits<T>::infinity());
    for (int64_t j = 0; j < kFewKeys; j += S::kWidth) {
      S::store(weights + j, hidden);
      S::store(grad + j, zero);
    }
    const int64_t keys = call.p.keys;
    const RowRun key_rows = call.keys_of(call.p.key, at.batch, kv_head);
    if (keys > 0) {
      few_key_scores<T, Stored>(query, key_rows, key_tail, weights);
      few_key_scores<T, Stored>(grad_out, call.keys_of(call.p.value, at.batch, kv_head), value_tail, grad);
    }
    const bool masked = call.p.mask.data != nullptr;
    if (masked) load_mask_row<T>(call.p, at, 0, keys, s.bias);
    finish_row<T>(call.p, at, 0, keys, masked ? s.bias : nullptr, weights);
    mark_visible_row<T>(keys, weights, s.visible + r * kFewKeys);
    const auto shift = S::set(row.row_max), inverse = S::set(row.inverse_sum), delta = S::set(row.delta);
    for (int64_t j = 0; j < keys; j += S::kWidth) {
      const auto weight = normalised_weight<T>(S::load(weights + j), shift, inverse);
      S::store(weights + j, weight);
      S::store(grad + j, score_gradient<T>(weight, S::load(grad + j), delta));
    }
    for (int64_t e = 0; e < p.head_dim; e += S::kWidth) S::store(s.sums + e, zero);
    if (keys > 0) {
      const FewQueryValues<T> sums{grad, s.visible + r * kFewKeys, kFewKeys, p.head_dim, s.sums, 0};
      columns.template add<1>(sums, 0, {key_rows, key_rows});
    }
    store_sums<T>(call.a.grad_query, p.dtype, at.batch, at.head, at.query, 1, p.head_dim, {s.sums, 0},
                  static_cast<T>(p.scale));
  }
};

template <class T, class Stored>
void few_keys_backward_as(const AttentionParams& p, const BackwardArguments& a, int64_t most_queries,
                          const ThreadPool& pool) {
  const FewKeysBackwardTask<T, Stored> task(p, a, most_queries);
  for_each_item(pool, task.items(), task, Items::kIndependent);
}

// Computes a call, or those elements of its batch that have at most `most_queries` queries and kFewKeys keys.
template <class T>
void few_keys_backward(const AttentionParams& p, const BackwardArguments& a, int64_t most_queries,
                       const ThreadPool& pool) {
  if constexpr (sizeof(T) == 4) {
    if (p.dtype == DType::kBFloat16) {
      return few_keys_backward_as<T, StoredBFloat16<T>>(p, a, most_queries, pool);
    }
    if (p.dtype == DType::kFloat16)
      return few_keys_backward_as<T, StoredFloat16<T>>(p, a, most_queries, pool);
  }
  few_keys_backward_as<T, StoredAsT<T>>(p, a, most_queries, pool);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
