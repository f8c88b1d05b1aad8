// The forward for very few queries, as in generating text. Its time is that of reading keys and values, so it
// reads them once, in order, with every thread. An item is a chunk of the keys of one kv head, for all query
// heads that read it; a second pass merges the chunks' softmax states. An only chunk needs no second pass.
// Chunks and result depend on the shape only.
#pragma once

#include "../products/few_query_products.h"
#include "decode_item.h"
#include "few_keys.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The options that decoding applies, see Note [Declared options] in core/options.h. Calls with other options
// are computed by strips, however few their queries are.
constexpr OptionSet kDecodeOptions = {Option::kMask,        Option::kOwnMasks,   Option::kAlibiSlopes,
                                      Option::kSinks,       Option::kDropout,    Option::kWindow,
                                      Option::kQueryOffset, Option::kSoftcap,    Option::kPackedQueries,
                                      Option::kPackedKeys,  Option::kKeyLengths, Option::kQueryOffsets,
                                      Option::kPages};

// Returns the most queries with which a call, or an element of its batch, is decoded. Decoding multiplies the
// queries by the scale.
inline int64_t most_decoded(const AttentionParams& p) {
  return options_of(p).within(kDecodeOptions) && scale_keeps_queries(p.scale) ? most_few_queries(p) : 0;
}

template <class P>
struct DecodeTask {
  using T = Scalar<P>;
  using Products = FewQueryProducts<P>;
  const AttentionParams& p;
  const ForwardOutputs& outputs;
  int64_t group, chunks;
  int64_t item_heads, item_chunks;
  int64_t parts, runs;  // of the heads, and of the chunks
  // States of several chunks, [batch * heads][chunks][queries]; those of `out` have [padded value_dim] more.
  RowSoftmax<T>* softmax;
  T* out;
  int64_t queries_size, out_stride;  // sizes of a kv head's queries and of an output row
  int64_t sums_stride;               // in whole vectors, also those of pairs

  static int64_t chunks_of(const AttentionParams& p) {
    return p.keys > 0 ? divide_up(p.keys, kDecodeChunk) : 1;
  }
  static int64_t states_of(const AttentionParams& p) {
    const int64_t chunks = chunks_of(p);
    return chunks == 1 ? 0 : p.batch * p.heads * chunks * p.queries;
  }
  static int64_t state_bytes(const AttentionParams& p) {
    return Arena::bytes_for<RowSoftmax<T>>(states_of(p)) +
           Arena::bytes_for<T>(states_of(p) * round_up_to_vector<T>(p.value_dim));
  }
  static DecodeItem item_of(const AttentionParams& p, int64_t all_chunks, int threads) {
    return DecodeItem::of(p, head_step(p, Products::kStepKeys), all_chunks, threads);
  }
  DecodeTask(const AttentionParams& params, const ForwardOutputs& results, DecodeItem item, Arena& states)
      : p(params),
        outputs(results),
        group(p.heads / p.kv_heads),
        chunks(chunks_of(p)),
        item_heads(item.heads),
        item_chunks(smaller(item.chunks, chunks)),
        parts(p.kv_heads / item_heads),
        runs(divide_up(chunks, item_chunks)),
        softmax(states.take<RowSoftmax<T>>(states_of(p))),
        out(states.take<T>(states_of(p) * round_up_to_vector<T>(p.value_dim))),
        queries_size(Products::queries_size(p, rows_per_kv_head())),
        out_stride(round_up_to_vector<T>(p.value_dim)),
        sums_stride(round_up(p.value_dim, 32)) {}

  int64_t state(int64_t batch, int64_t head, int64_t chunk) const {
    return ((batch * p.heads + head) * chunks + chunk) * p.queries;
  }
  int64_t items() const { return p.batch * parts * runs; }

  // Rows are the queries of all heads that read the item's kv heads, head after head.
  int64_t rows_per_kv_head() const { return group * p.queries; }
  int64_t rows() const { return item_heads * rows_per_kv_head(); }
  // Room for rows that a tile reads or sums up beyond them.
  int64_t score_rows() const { return rows() + Products::kSpareRows; }
  int64_t sums_per_kv_head() const { return Products::sums_rows(rows_per_kv_head()); }
  int64_t sums_rows() const { return item_heads * sums_per_kv_head(); }
  int64_t pages() const { return PageList::most_pages(p, item_chunks * kDecodeChunk); }

  struct Parts {
    typename Products::Query* query;        // [kv heads][queries_size]
    T *out, *sums;                          // [rows][out_stride], [sums_rows][sums_stride]
    RowSoftmax<T>* softmax;                 // [rows]
    T *rescale, *factor;                    // [rows]
    T *scores, *bias, *visible;             // [score_rows][kDecodeBlock]
    const char **key_pages, **value_pages;  // [pages]

    SELFATTN_OUT_OF_LINE void allocate(const DecodeTask& task, Arena& arena) {
      query = arena.take<typename Products::Query>(task.item_heads * task.queries_size);
      out = arena.take<T>(task.rows() * task.out_stride);
      sums = arena.take<T>(task.sums_rows() * task.sums_stride);
      softmax = arena.take<RowSoftmax<T>>(task.rows());
      for (T** of_rows : {&rescale, &factor}) *of_rows = arena.take<T>(task.rows());
      for (T** block : {&scores, &bias, &visible}) *block = arena.take<T>(task.score_rows() * kDecodeBlock);
      key_pages = arena.take<const char*>(task.pages());
      value_pages = arena.take<const char*>(task.pages());
    }
  };
  using Scratch = WorkerScratch<Parts, typename Products::Session>;

  void operator()(int64_t item, Scratch& s) const {
    s.lay_out(*this);
    // Items follow the order of memory: (batch, heads, keys, dim), or (batch, keys, heads, dim), whose heads
    // share pages.
    const int64_t batch = item / (parts * runs), in_batch = item % (parts * runs);
    const int64_t run_of_chunks = heads_inside(p) ? in_batch / parts : in_batch % runs;
    const int64_t kv_head = (heads_inside(p) ? in_batch % parts : in_batch / runs) * item_heads;
    for (int64_t i = 0; i < item_heads; ++i) {
      Products::load_queries(p, {batch, (kv_head + i) * group, group, 0, p.queries},
                             s.query + i * queries_size);
    }
    const int64_t first = run_of_chunks * item_chunks;
    const int64_t end = smaller(first + item_chunks, chunks);
    s.session.take_rows(rows_per_kv_head());
    const Keys keys(p, batch, kv_head, visible_of(first * kDecodeChunk, end * kDecodeChunk), s);
    for (int64_t chunk = first; chunk < end; ++chunk) {
      add_chunk(keys, chunk, s, false);
      // 0 * Inf or 0 * NaN of a hidden key shows as NaN in the result.
      if (!all_finite(s.out, out_stride, rows(), p.value_dim)) add_chunk(keys, chunk, s, true);
      if (chunks == 1) {
        for (int64_t r = 0; r < rows(); ++r) {
          store_query<T>(p, outputs, batch, kv_head * group + r / p.queries, r % p.queries, s.softmax[r],
                         s.out + r * out_stride);
        }
        return;
      }
      for (int64_t i = 0; i < item_heads * group; ++i) {
        const int64_t from = i * p.queries, to = state(batch, kv_head * group + i, chunk);
        std::copy(s.softmax + from, s.softmax + from + p.queries, softmax + to);
        memcpy(out + to * out_stride, s.out + from * out_stride,
               static_cast<size_t>(p.queries * out_stride) * sizeof(T));
      }
    }
  }

  // The keys of an item that some query sees; they are the same for every head.
  struct Keys {
    int64_t batch, kv_head;
    int64_t begin, end;
    PageList keys, values;

    Keys(const AttentionParams& p, int64_t batch_index, int64_t head, KeyRange range, Scratch& s)
        : batch(batch_index),
          kv_head(head),
          begin(range.begin),
          end(range.end),
          keys(p, p.key, batch, kv_head, begin, end, s.key_pages),
          values(p, p.value, batch, kv_head, begin, end, s.value_pages) {}
  };

  KeyRange visible_of(int64_t first, int64_t end) const {
    KeyRange range = visible_keys(p, 0, p.queries - 1);
    range.begin = range.begin / 4 * 4;  // the keys of one Philox call
    return {larger(range.begin, first), smaller(range.end, end)};
  }

  DecodeRow row(const Keys& keys, int64_t index) const {
    return {keys.batch, keys.kv_head * group + index / p.queries, index % p.queries};
  }

  void add_chunk(const Keys& keys, int64_t chunk, Scratch& s, bool leave_hidden_out) const {
    for (int64_t r = 0; r < rows(); ++r) {
      const DecodeRow at = row(keys, r);
      const bool has_sink = chunk == 0 && p.sinks.data != nullptr;
      s.softmax[r] = RowSoftmax<T>::of_sink(has_sink ? head_scalar<T>(p.sinks, at.batch, at.head)
                                                     : -std::numeric_limits<T>::infinity());
    }
    memset(s.out, 0, static_cast<size_t>(rows() * out_stride) * sizeof(T));
    const KeyRange range = visible_of(chunk * kDecodeChunk, (chunk + 1) * kDecodeChunk);
    for (int64_t key = range.begin; key < range.end; key += kDecodeBlock) {
      const int64_t left = range.end - key;
      add_block(keys, key, smaller(left, kDecodeBlock), s, leave_hidden_out);
    }
  }

  // All rows of the item meet one block of keys.
  void add_block(const Keys& all, int64_t key, int64_t keys, Scratch& s, bool leave_hidden_out) const {
    const bool masked = p.mask.data != nullptr;
    if (masked) {
      bool visible = false;
      for (int64_t r = 0; r < rows(); ++r) {
        if (load_mask_row<T>(p, row(all, r), key, keys, s.bias + r * kDecodeBlock)) visible = true;
      }
      if (!visible) return;
    }
    const int64_t then = key + keys, left = all.end - then;
    const RowSpan values = all.values.span(key, keys);
    add_scores(all.keys.span(key, keys), values, s);
    for (int64_t r = 0; r < rows(); ++r) {
      const DecodeRow at = row(all, r);
      T* scores = s.scores + r * kDecodeBlock;
      finish_row<T>(p, at, key, keys, masked ? s.bias + r * kDecodeBlock : nullptr, scores);
      if (leave_hidden_out) mark_visible_row<T>(keys, scores, s.visible + r * kDecodeBlock);
      if (outputs.row_mean != nullptr) {
        softmax_row<T, Statistics::kAll>(keys, scores, s.softmax + r, s.rescale + r);
      } else {
        softmax_row<T, Statistics::kNone>(keys, scores, s.softmax + r, s.rescale + r);
      }
      if (p.dropout.enabled) drop_row<T>(p.dropout, at, key, keys, scores);
      s.factor[r] = Products::round_weights(keys, scores);
    }
    add_values(values, all.keys.span(then, smaller(left, kDecodeBlock)), s,
               leave_hidden_out ? s.visible : nullptr);
  }

  // Calls product(rows, head, first) for the rows of every head, with several heads a step at a time.
  // Meanwhile it prefetches the rows that follow, and then those of `next`.
  template <class Product>
  void for_each_step(const RowSpan& all, const RowSpan& next, int64_t row_bytes, Product product) const {
    if (all.keys <= kVeryFewKeys || (item_heads == 1 && all.keys * row_bytes <= kVeryFewBytes)) {
      const RowWalk rows(all);
      for (int64_t i = 0; i < item_heads; ++i) {
        const RowWalk of_head = rows.of_head(i);
        product(FewQueryRows{p.dtype, all.keys, of_head, RowsAhead(of_head)}, i, 0);
      }
      return;
    }
    if (item_heads == 1) {
      RowWalk soon(all, &next);
      soon.skip(rows_ahead(row_bytes));
      const RowsAhead ahead = RowsAhead::with_pages(soon, all.page_keys);
      return product(FewQueryRows{p.dtype, all.keys, RowWalk(all), ahead}, 0, 0);
    }
    const int64_t step = head_step(p, Products::kStepKeys);
    const RowSpan of_all = all.of_heads(item_heads), next_of_all = next.of_heads(item_heads);
    RowWalk rows(all), soon(all, &next), soon_of_all(of_all, &next_of_all);
    soon.skip(step);
    // Where other heads lie between those of the item, the next rows in the order of memory are two or three.
    const bool in_order = heads_inside(p) && all.key_step == item_heads * all.head_step;
    if (in_order) soon_of_all.skip(step * item_heads);
    for (int64_t first = 0; first < all.keys; first += step) {
      const int64_t count = smaller(all.keys - first, step);
      for (int64_t i = 0; i < item_heads; ++i) {
        const RowWalk of_head = rows.of_head(i);
        product(FewQueryRows{p.dtype, count, of_head, RowsAhead(in_order ? soon_of_all : soon.of_head(i))}, i,
                first);
        if (in_order) soon_of_all.skip(count);
      }
      rows.skip(count);
      soon.skip(count);
    }
  }

  void add_scores(const RowSpan& keys, const RowSpan& then, Scratch& s) const {
    const int64_t of_head = rows_per_kv_head();
    for_each_step(keys, then, p.head_dim * size_of(p.dtype),
                  [&](const FewQueryRows& rows, int64_t head, int64_t first) {
                    Products::scores(p, s.query + head * queries_size, of_head, rows,
                                     s.scores + head * of_head * kDecodeBlock + first, kDecodeBlock);
                  });
  }

  void add_values(const RowSpan& values, const RowSpan& then, Scratch& s, const T* visible) const {
    using S = Simd<T>;
    const int64_t of_head = rows_per_kv_head();
    const int64_t of_sums = sums_per_kv_head();
    memset(s.sums, 0, static_cast<size_t>(sums_rows() * sums_stride) * sizeof(T));
    for_each_step(values, then, p.value_dim * size_of(p.dtype),
                  [&](const FewQueryRows& rows, int64_t head, int64_t first) {
                    const int64_t at = head * of_head * kDecodeBlock;
                    const auto a = Products::weigh(s.scores + at, visible != nullptr ? visible + at : nullptr,
                                                   kDecodeBlock, p.value_dim,
                                                   s.sums + head * of_sums * sums_stride, sums_stride);
                    Products::values(a.from(first), of_head, rows);
                  });
    for (int64_t r = 0; r < rows(); ++r) {
      const auto rescale = S::set(s.rescale[r]), factor = S::set(s.factor[r]);
      const T* sums = s.sums + (r / of_head * of_sums + r % of_head) * sums_stride;
      for (int64_t e = 0; e < out_stride; e += S::kWidth) {
        T* out = s.out + r * out_stride + e;
        const auto sum = S::mul(Products::load_sums(sums, e), factor);
        S::store(out, S::fma(S::load(out), rescale, sum));
      }
    }
  }
};

// Merges the chunks of one head in their order and writes the results.
template <class P>
struct DecodeMerge {
  using T = Scalar<P>;
  const DecodeTask<P>& task;

  int64_t items() const { return task.chunks == 1 ? 0 : task.p.batch * task.p.heads; }

  struct Parts {
    T *factor, *out;  // [chunks], [out_stride] of one query, padded

    SELFATTN_OUT_OF_LINE void allocate(const DecodeMerge& merge, Arena& arena) {
      factor = arena.take<T>(round_up_to_vector<T>(merge.task.chunks));
      out = arena.take<T>(merge.task.out_stride);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<T>>;

  void operator()(int64_t head_index, Scratch& scratch) const {
    using S = Simd<T>;
    const AttentionParams& p = task.p;
    const T nothing = -std::numeric_limits<T>::infinity();
    const int64_t batch = head_index / p.heads, head = head_index % p.heads, chunks = task.chunks;
    for (int64_t query = 0; query < p.queries; ++query) {
      const auto of_chunk = [&](int64_t c) -> const RowSoftmax<T>& {
        return task.softmax[task.state(batch, head, c) + query];
      };
      RowSoftmax<T> all = RowSoftmax<T>::of_sink(nothing);
      for (int64_t c = 0; c < chunks; ++c) {
        all.max = std::max(all.max, of_chunk(c).max);
        all.top = std::max(all.top, of_chunk(c).top);
      }
      const T shift = all.max == nothing ? T(0) : all.max;
      for (int64_t c = 0; c < round_up_to_vector<T>(chunks); ++c) {
        scratch.factor[c] = c < chunks ? of_chunk(c).max - shift : T(0);
      }
      for (int64_t c = 0; c < chunks; c += S::kWidth) {
        S::store(scratch.factor + c, exp_nonpositive<T>(S::load(scratch.factor + c)));
      }
      for (int64_t c = 0; c < chunks; ++c) {
        const RowSoftmax<T>& part = of_chunk(c);
        all.sum += scratch.factor[c] * part.sum;
        // A chunk that saw nothing has a sum of 0 and a maximum of -inf.
        if (part.sum != T(0)) all.mean += scratch.factor[c] * (part.mean + part.sum * (part.max - shift));
      }
      for (int64_t e = 0; e < p.value_dim; e += S::kWidth) {
        auto total = S::set(T(0));
        for (int64_t c = 0; c < chunks; ++c) {
          const T* rows = task.out + (task.state(batch, head, c) + query) * task.out_stride;
          total = S::fma(S::set(scratch.factor[c]), S::load(rows + e), total);
        }
        S::store(scratch.out + e, total);
      }
      store_query<T>(p, task.outputs, batch, head, query, all, scratch.out);
    }
  }
};

template <class P>
void decode(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  if (p.keys <= kFewKeys) return few_keys<Scalar<P>>(p, outputs, p.queries, pool);
  Arena arena(DecodeTask<P>::state_bytes(p));
  const int64_t chunks = p.batch * DecodeTask<P>::chunks_of(p);
  const DecodeTask<P> task(p, outputs, DecodeTask<P>::item_of(p, chunks, pool.threads), arena);
  for_each_item(pool, task.items(), task, Items::kIndependent);
  const DecodeMerge<P> merge{task};
  for_each_item(pool, merge.items(), merge, Items::kIndependent);
}

// Decodes the elements with few queries of a batch whose elements have their own lengths. The chunks of all
// elements are one list, so that a long sequence keeps every thread busy and a short one costs no wait.
template <class P>
void decode_sequences(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  few_keys<Scalar<P>>(p, outputs, most_decoded(p), pool);
  AttentionParams rest = p;
  rest.sequences.least_keys = kFewKeys + 1;
  const auto calls = element_calls(rest, outputs, 1, most_decoded(p));
  int64_t bytes = 0, chunks = 0;
  for (const auto& call : calls) {
    bytes += DecodeTask<P>::state_bytes(call.params);
    chunks += DecodeTask<P>::chunks_of(call.params);
  }
  Arena arena(bytes);
  std::vector<DecodeTask<P>> tasks;
  std::vector<DecodeMerge<P>> merges;
  tasks.reserve(calls.size());
  merges.reserve(calls.size());
  for (const auto& call : calls) {
    tasks.emplace_back(call.params, call.results, DecodeTask<P>::item_of(call.params, chunks, pool.threads),
                       arena);
    merges.push_back({tasks.back()});
  }
  const JointTask<DecodeTask<P>> joint(tasks);
  for_each_item(pool, joint.items(), joint, Items::kIndependent);
  const JointTask<DecodeMerge<P>> joint_merge(std::move(merges));
  for_each_item(pool, joint_merge.items(), joint_merge, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
