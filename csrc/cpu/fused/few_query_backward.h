// The backward for very few queries. A strip of them would leave most lanes empty, so it works as decoding
// does (decode.h): keys and values are read where they lie, once for all rows of queries that share a kv
// head, with lanes over the head dim in products and over the keys in the softmax.
//
// An item is a chunk of the keys of one kv head. It has all rows that reach its keys, so that it stores their
// gradients row by row. dQ of a chunk is a partial sum; with several chunks a second pass adds these up, in
// the order of the chunks. Chunks depend on the shape alone.
#pragma once

#include "../products/few_query_outer.h"
#include "../products/few_query_scores.h"
#include "../products/few_query_values.h"
#include "gradient_results.h"
#include "gradient_row.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The options that it applies, see Note [Declared options] in core/options.h.
constexpr OptionSet kFewQueryBackwardOptions = {
    Option::kMask,          Option::kOwnMasks,   Option::kAlibiSlopes, Option::kSinks,
    Option::kDropout,       Option::kWindow,     Option::kQueryOffset, Option::kSoftcap,
    Option::kPackedQueries, Option::kPackedKeys, Option::kKeyLengths,  Option::kQueryOffsets};

// Returns the most queries of a call, or of an element of its batch, that is computed here; -1 if none is.
// The queries are multiplied by the scale. What gradients are wanted plays no part, as it must not change a
// bit.
inline int64_t most_in_backward(const AttentionParams& p) {
  return options_of(p).within(kFewQueryBackwardOptions) && scale_keeps_queries(p.scale) ? most_few_queries(p)
                                                                                        : -1;
}

template <class T>
struct FewQueryBackwardTask {
  using S = Simd<T>;

  static constexpr int64_t kBlock = 128;  // keys of a block of scores; its keys and values stay in a cache
  static constexpr int64_t kChunk = 512;  // keys of an item

  const AttentionParams& p;
  const BackwardArguments& a;
  int64_t group, chunks, rows;         // rows of queries of an item
  int64_t query_stride, value_stride;  // padded row lengths
  // Sums of several chunks, [batch * heads][chunks][queries]; those of dQ have [query_stride] more.
  T *chunk_sums, *chunk_slopes;

  static int64_t chunks_of(const AttentionParams& p) { return p.keys > 0 ? divide_up(p.keys, kChunk) : 1; }
  static int64_t sums_of(const AttentionParams& p) {
    const int64_t chunks = chunks_of(p);
    return chunks == 1 ? 0 : p.batch * p.heads * chunks * p.queries;
  }
  static int64_t sum_bytes(const AttentionParams& p) {
    return Arena::bytes_for<T>(sums_of(p) * round_up_to_vector<T>(p.head_dim)) +
           Arena::bytes_for<T>(sums_of(p));
  }
  FewQueryBackwardTask(const AttentionParams& params, const BackwardArguments& arguments, Arena& sums)
      : p(params),
        a(arguments),
        group(p.heads / p.kv_heads),
        chunks(chunks_of(p)),
        rows(group * p.queries),
        query_stride(round_up_to_vector<T>(p.head_dim)),
        value_stride(round_up_to_vector<T>(p.value_dim)),
        chunk_sums(sums.take<T>(sums_of(p) * query_stride)),
        chunk_slopes(sums.take<T>(sums_of(p))) {}

  int64_t items() const { return p.batch * p.kv_heads * chunks; }
  // The index of a chunk's sums.
  int64_t sum(int64_t batch, int64_t head, int64_t chunk) const {
    return ((batch * p.heads + head) * chunks + chunk) * p.queries;
  }

  struct Parts {
    T *query, *grad_out;                       // [rows][padded], the queries times the scale
    T *out, *residual;                         // [padded] of one row
    GradientRow<T>* gradient_rows;             // [rows]
    T* slopes;                                 // [rows] sums of dS times -|distance|
    T *weights, *grad, *visible, *bias;        // [rows][kBlock]
    T *cap, *keep, *of_statistics, *distance;  // [kBlock] of one row: its GradientTerms
    T* sums;                                   // [rows][query_stride] dQ without the scale

    SELFATTN_OUT_OF_LINE void allocate(const FewQueryBackwardTask& t, Arena& arena) {
      query = arena.take<T>(t.rows * t.query_stride);
      grad_out = arena.take<T>(t.rows * t.value_stride);
      for (T** of_one : {&out, &residual}) *of_one = arena.take<T>(t.value_stride);
      gradient_rows = arena.take<GradientRow<T>>(t.rows);
      slopes = arena.take<T>(t.rows);
      for (T** block : {&weights, &grad, &visible, &bias}) *block = arena.take<T>(t.rows * kBlock);
      for (T** of_one : {&cap, &keep, &of_statistics, &distance}) *of_one = arena.take<T>(kBlock);
      sums = arena.take<T>(t.rows * t.query_stride);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  // The keys begin .. end - 1 of a kv head.
  struct Item {
    int64_t batch, kv_head, chunk, begin, end;
  };

  void operator()(int64_t number, Scratch& s) const {
    s.lay_out(*this);
    const int64_t head = number / chunks, chunk = number % chunks;
    const Item item{head / p.kv_heads, head % p.kv_heads, chunk, chunk * kChunk,
                    smaller((chunk + 1) * kChunk, p.keys)};
    for (int64_t r = 0; r < rows; ++r) load_row_of_queries(item, r, s);
    // 0 * Inf or 0 * NaN of what is hidden shows as NaN in a result.
    if (!add_keys(item, s, false)) add_keys(item, s, true);
    for (int64_t i = 0; i < group; ++i) {
      const int64_t query_head = item.kv_head * group + i;
      const T *sums = s.sums + i * p.queries * query_stride, *slopes = s.slopes + i * p.queries;
      if (chunks == 1) {
        store(item.batch, query_head, sums, slopes);
        continue;
      }
      const int64_t to = sum(item.batch, query_head, chunk);
      memcpy(chunk_sums + to * query_stride, sums, static_cast<size_t>(p.queries * query_stride) * sizeof(T));
      memcpy(chunk_slopes + to, slopes, static_cast<size_t>(p.queries) * sizeof(T));
    }
  }

  // Writes what a head's queries have summed up over all keys.
  void store(int64_t batch, int64_t head, const T* sums, const T* slopes) const {
    store_sums<T>(a.grad_query, p.dtype, batch, head, 0, p.queries, p.head_dim, {sums, query_stride},
                  static_cast<T>(p.scale));
    if (a.grad_slopes_rows == nullptr) return;
    memcpy(static_cast<T*>(a.grad_slopes_rows) + p.row(batch, head, 0), slopes,
           static_cast<size_t>(p.queries) * sizeof(T));
  }

  DecodeRow row(const Item& item, int64_t index) const {
    return {item.batch, item.kv_head * group + index / p.queries, index % p.queries};
  }

  void load_row_of_queries(const Item& item, int64_t r, Scratch& s) const {
    s.gradient_rows[r] = load_gradient_row<T>(p, a, row(item, r), item.chunk == 0, s.query + r * query_stride,
                                              s.grad_out + r * value_stride, s.out, s.residual);
  }

  // Adds the item's keys to dQ, and stores their gradients. Returns whether all sums are finite.
  bool add_keys(const Item& item, Scratch& s, bool leave_hidden_out) const {
    memset(s.sums, 0, static_cast<size_t>(rows * query_stride) * sizeof(T));
    memset(s.slopes, 0, static_cast<size_t>(rows) * sizeof(T));
    bool finite = true;
    for (int64_t key = item.begin; key < item.end; key += kBlock) {
      const int64_t keys = smaller(item.end - key, kBlock);
      const EvenRows key_rows = rows_of(p.key, item, key, keys, p.head_dim);
      const bool seen = weigh_block(item, key_rows, key, keys, s, leave_hidden_out);
      const T* visible = leave_hidden_out ? s.visible : nullptr;
      const int64_t summed = seen ? rows : 0;
      finite &= few_query_outer<T>({s.weights, visible, kBlock, s.grad_out, summed, value_stride}, keys,
                                   result_of(a.grad_value, item, key, p.value_dim));
      finite &= few_query_outer<T>({s.grad, visible, kBlock, s.query, summed, query_stride}, keys,
                                   result_of(a.grad_key, item, key, p.head_dim));
      if (seen && rows > 0) {
        few_query_values<T>({s.grad, visible, kBlock, p.head_dim, s.sums, query_stride}, rows,
                            key_rows.rows());
      }
    }
    return finite && all_finite(s.sums, query_stride, rows, p.head_dim);
  }

  EvenRows rows_of(const View& view, const Item& item, int64_t key, int64_t keys, int64_t columns) const {
    const int64_t bytes = size_of(p.dtype);
    const void* first = element(view.data, p.dtype, view.offset(item.batch, item.kv_head, key));
    return {p.dtype, first, keys, view.stride[2] * bytes, columns * bytes};
  }
  OuterResult result_of(const View& view, const Item& item, int64_t key, int64_t columns) const {
    return {element(view.data, p.dtype, view.offset(item.batch, item.kv_head, key)), p.dtype, view.stride[2],
            columns};
  }

  // Fills s.weights with P, after dropout, and s.grad with dS of a block; returns false if all of it is
  // hidden.
  bool weigh_block(const Item& item, const EvenRows& key_rows, int64_t key, int64_t keys, Scratch& s,
                   bool leave_hidden_out) const {
    const KeyRange range = visible_keys(p, 0, p.queries - 1);
    if (range.begin >= key + keys || range.end <= key) return false;
    const bool masked = p.mask.data != nullptr;
    if (masked) {
      bool visible = false;
      for (int64_t r = 0; r < rows; ++r) {
        if (load_mask_row<T>(p, row(item, r), key, keys, s.bias + r * kBlock)) visible = true;
      }
      if (!visible) return false;
    }
    few_query_scores<T>(s.query, rows, key_rows.rows(), p.head_dim, s.weights, kBlock, 1);
    few_query_scores<T>(s.grad_out, rows, rows_of(p.value, item, key, keys, p.value_dim).rows(), p.value_dim,
                        s.grad, kBlock, 1);
    for (int64_t r = 0; r < rows; ++r) {
      const DecodeRow at = row(item, r);
      T* const weights = s.weights + r * kBlock;
      if (p.softcap > 0.0) keep_softcap_gradient<T>(p, keys, weights, s.cap);
      finish_row<T>(p, at, key, keys, masked ? s.bias + r * kBlock : nullptr, weights);
      if (leave_hidden_out) mark_visible_row<T>(keys, weights, s.visible + r * kBlock);
      if (a.grad_weights.data != nullptr) add_weights_gradient(at, key, keys, s.grad + r * kBlock);
      weigh_row(at, r, key, keys, s);
    }
    return true;
  }

  // Adds the gradient of returned weights to dP.
  void add_weights_gradient(const DecodeRow& at, int64_t key, int64_t keys, T* grad) const {
    const View& g = a.grad_weights;
    const int64_t first = g.offset(at.batch, at.head, at.query) + key * g.stride[3];
    for (int64_t j = 0; j < keys; ++j) grad[j] += load_element<T>(g.data, g.dtype, first + j * g.stride[3]);
  }

  // Does for a row what gradients_of_statistics does for a strip.
  void add_of_statistics(const DecodeRow& at, int64_t r, int64_t key, int64_t keys, Scratch& s) const {
    const T* const scores = s.weights + r * kBlock;
    for (int64_t j = 0; j < kBlock; ++j) s.of_statistics[j] = T(0);
    if (a.grad_keys != nullptr) {
      const T* of_keys = static_cast<const T*>(a.grad_keys) + p.key_place(at.batch, at.head, key);
      std::copy(of_keys, of_keys + keys, s.of_statistics);
    }
    if (a.grad_mean == nullptr) return;
    const auto shift = S::set(s.gradient_rows[r].row_max), grad_mean = S::set(s.gradient_rows[r].grad_mean);
    for (int64_t j = 0; j < keys; j += S::kWidth) {
      const auto difference = S::sub(S::load(scores + j), shift);
      S::store(s.of_statistics + j, S::fma(grad_mean, difference, S::load(s.of_statistics + j)));
    }
  }

  void weigh_row(const DecodeRow& at, int64_t r, int64_t key, int64_t keys, Scratch& s) const {
    GradientTerms<T> terms;
    if (p.dropout.enabled) {
      for (int64_t j = 0; j < kBlock; j += S::kWidth) S::store(s.keep + j, S::set(T(1)));
      drop_row<T>(p.dropout, at, key, keys, s.keep);
      terms.keep = s.keep;
    }
    if (has_gradients_of_statistics(a)) {
      add_of_statistics(at, r, key, keys, s);
      terms.added = s.of_statistics;
    }
    if (a.grad_slopes_rows != nullptr) {
      for (int64_t j = 0; j < keys; j += S::kWidth) {
        S::store(s.distance + j, distances<T>(at.query + p.query_offset - key - j));
      }
      terms.distance = s.distance;
    }
    if (p.softcap > 0.0) terms.cap = s.cap;
    s.slopes[r] +=
        weigh_gradient_row<T>(s.gradient_rows[r], terms, keys, s.weights + r * kBlock, s.grad + r * kBlock);
  }
};

// Adds up the sums of the chunks of one head, in their order.
template <class T>
struct FewQueryBackwardMerge {
  const FewQueryBackwardTask<T>& task;

  int64_t items() const { return task.chunks > 1 ? task.p.batch * task.p.heads : 0; }

  struct Parts {
    void allocate(const FewQueryBackwardMerge&, Arena&) {}
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t item, Scratch&) const {
    using S = Simd<T>;
    const AttentionParams& p = task.p;
    const int64_t batch = item / p.heads, head = item % p.heads;
    const int64_t first = task.sum(batch, head, 0);
    T* const sums = task.chunk_sums + first * task.query_stride;
    T* const slopes = task.chunk_slopes + first;
    const int64_t size = p.queries * task.query_stride;
    for (int64_t c = 1; c < task.chunks; ++c) {
      for (int64_t i = 0; i < size; i += S::kWidth) {
        S::store(sums + i, S::add(S::load(sums + i), S::load(sums + c * size + i)));
      }
      for (int64_t i = 0; i < p.queries; ++i) slopes[i] += slopes[c * p.queries + i];
    }
    task.store(batch, head, sums, slopes);
  }
};

template <class T>
void few_query_backward(const AttentionParams& p, const BackwardArguments& a, const ThreadPool& pool) {
  using Task = FewQueryBackwardTask<T>;
  Arena sums(Task::sum_bytes(p));
  const Task task(p, a, sums);
  for_each_item(pool, task.items(), task, Items::kIndependent);
  const FewQueryBackwardMerge<T> merge{task};
  for_each_item(pool, merge.items(), merge, Items::kIndependent);
}

// Computes elements of a batch, each as if it were alone.
template <class T>
void few_query_backward(const std::vector<ElementCall<BackwardArguments>>& calls, const ThreadPool& pool) {
  using Task = FewQueryBackwardTask<T>;
  int64_t bytes = 0;
  for (const auto& call : calls) bytes += Task::sum_bytes(call.params);
  Arena sums(bytes);
  std::vector<Task> tasks;
  std::vector<FewQueryBackwardMerge<T>> merges;
  tasks.reserve(calls.size());
  merges.reserve(calls.size());
  for (const auto& call : calls) {
    tasks.emplace_back(call.params, call.results, sums);
    merges.push_back({tasks.back()});
  }
  const JointTask<Task> joint(tasks);
  for_each_item(pool, joint.items(), joint, Items::kIndependent);
  const JointTask<FewQueryBackwardMerge<T>> joint_merge(std::move(merges));
  for_each_item(pool, joint_merge.items(), joint_merge, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
