// Attention forward for very few queries, as in generating text: what counts is reading keys and values once,
// in order, with every thread. An item is a chunk of the keys of one kv head, for all query heads that read
// it; a second pass merges the chunks' softmax states. Chunks depend on the shape only, and so does the
// result.
#pragma once

#include "forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kDecodeChunk = 1024;  // keys; a multiple of kKeyBlock

template <class T>
struct DecodeTask {
  const AttentionParams& p;
  int64_t group, chunks;
  // States of the chunks, [batch * heads][chunks][queries] and, for out, [padded value_dim] more.
  T *row_max, *row_sum, *out;
  int64_t out_stride;

  int64_t state(int64_t batch, int64_t head, int64_t chunk) const {
    return ((batch * p.heads + head) * chunks + chunk) * p.queries;
  }
  int64_t items() const { return p.batch * p.kv_heads * chunks; }

  struct Scratch {
    Arena arena;
    ForwardScratch<T> block;
    ForwardStrip<T>* strips;

    explicit Scratch(const DecodeTask& task)
        : arena(ForwardScratch<T>::bytes(task.p) + Arena::bytes_for<ForwardStrip<T>>(task.group) +
                task.group * ForwardStrip<T>::bytes(task.p)),
          block(task.p, arena),
          strips(arena.take<ForwardStrip<T>>(task.group)) {
      for (int64_t i = 0; i < task.group; ++i) (new (strips + i) ForwardStrip<T>)->allocate(task.p, arena);
    }
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const int64_t chunk = item % chunks, kv_index = item / chunks;
    const int64_t batch = kv_index / p.kv_heads, first_head = kv_index % p.kv_heads * group;
    for (int64_t i = 0; i < group; ++i) scratch.strips[i].begin(p, batch, first_head + i, 0, p.queries);
    run(chunk, scratch, false);
    bool finite = true;
    for (int64_t i = 0; i < group; ++i) finite = finite && scratch.strips[i].finite(p);
    if (!finite) run(chunk, scratch, true);
    for (int64_t i = 0; i < group; ++i) {
      const ForwardStrip<T>& strip = scratch.strips[i];
      const int64_t to = state(batch, strip.head, chunk);
      memcpy(row_max + to, strip.row_max, static_cast<size_t>(p.queries) * sizeof(T));
      memcpy(row_sum + to, strip.row_sum, static_cast<size_t>(p.queries) * sizeof(T));
      memcpy(out + to * out_stride, strip.out_t, static_cast<size_t>(p.queries * out_stride) * sizeof(T));
    }
  }

  void run(int64_t chunk, Scratch& scratch, bool leave_hidden_out) const {
    for (int64_t i = 0; i < group; ++i) scratch.strips[i].reset(p, chunk == 0);
    const int64_t begin = chunk * kDecodeChunk;
    const int64_t end = begin + kDecodeChunk < p.keys ? begin + kDecodeChunk : p.keys;
    KeyRange range = visible_keys(p, 0, p.queries - 1);  // the same for every head
    if (range.begin < begin) range.begin = begin;
    if (range.end > end) range.end = end;
    if (range.begin >= range.end) return;
    forward_keys<T>(p, scratch.strips, group, range.begin, range.end, scratch.block, leave_hidden_out);
  }
};

// Merges the chunks of one head in their order and writes the results.
template <class T>
struct DecodeMerge {
  const DecodeTask<T>& chunks;
  const ForwardOutputs& outputs;

  struct Scratch {
    Arena arena;
    T* factor;  // [chunks] padded, of one query
    explicit Scratch(const DecodeMerge& merge)
        : arena(Arena::bytes_for<T>(round_up_to_vector<T>(merge.chunks.chunks))),
          factor(arena.take<T>(round_up_to_vector<T>(merge.chunks.chunks))) {}
  };

  void operator()(int64_t head_index, Scratch& scratch) const {
    using S = Simd<T>;
    const AttentionParams& p = chunks.p;
    const T nothing = -std::numeric_limits<T>::infinity();
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    for (int64_t query = 0; query < p.queries; ++query) {
      T most = nothing;
      for (int64_t c = 0; c < chunks.chunks; ++c) {
        const T x = chunks.row_max[chunks.state(batch, head, c) + query];
        most = x > most ? x : most;
      }
      const T shift = most == nothing ? T(0) : most;
      for (int64_t c = 0; c < round_up_to_vector<T>(chunks.chunks); ++c) {
        scratch.factor[c] =
            c < chunks.chunks ? chunks.row_max[chunks.state(batch, head, c) + query] - shift : T(0);
      }
      for (int64_t c = 0; c < chunks.chunks; c += S::kWidth) {
        S::store(scratch.factor + c, exp_nonpositive<T>(S::load(scratch.factor + c)));
      }
      T sum = 0;
      for (int64_t c = 0; c < chunks.chunks; ++c) {
        sum += scratch.factor[c] * chunks.row_sum[chunks.state(batch, head, c) + query];
      }
      const int64_t row = head_index * p.queries + query;
      static_cast<T*>(outputs.row_max)[row] = most;
      static_cast<T*>(outputs.row_sum)[row] = sum;
      const auto scale = S::set(sum == T(0) ? T(0) : T(1) / sum);
      const int64_t at = outputs.out.offset(batch, head, query);
      for (int64_t e = 0; e < p.value_dim; e += S::kWidth) {
        auto total = S::set(T(0));
        for (int64_t c = 0; c < chunks.chunks; ++c) {
          const T* rows = chunks.out + (chunks.state(batch, head, c) + query) * chunks.out_stride;
          total = S::fma(S::set(scratch.factor[c]), S::load(rows + e), total);
        }
        store_with_residual<T>(outputs.out.data, outputs.out_residual, p.dtype, at + e, p.value_dim - e,
                               S::mul(total, scale));
      }
    }
  }
};

template <class T>
void decode(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  const int64_t chunks = p.keys > 0 ? (p.keys + kDecodeChunk - 1) / kDecodeChunk : 1;
  const int64_t states = p.batch * p.heads * chunks * p.queries, stride = round_up_to_vector<T>(p.value_dim);
  Arena arena(2 * Arena::bytes_for<T>(states) + Arena::bytes_for<T>(states * stride));
  const DecodeTask<T> task{p,
                           p.heads / p.kv_heads,
                           chunks,
                           arena.take<T>(states),
                           arena.take<T>(states),
                           arena.take<T>(states * stride),
                           stride};
  for_each_item(pool, task.items(), task);
  const DecodeMerge<T> merge{task, outputs};
  for_each_item(pool, p.batch * p.heads, merge);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
