// Attention forward: tiled online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), transposed as query_strip.h says.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

// A strip with its running softmax and output.
template <class T>
struct ForwardStrip : QueryStrip<T> {
  T* out_t;    // [value_dim][kLanes] unnormalised O^T
  T* row_max;  // [kLanes]
  T* row_sum;  // [kLanes]
  T* rescale;  // [kLanes] exp(old maximum - new maximum) of the current block

  static int64_t bytes(const AttentionParams& p) {
    return Arena::bytes_for<T>(p.head_dim * kLanes<T>) + Arena::bytes_for<T>(p.value_dim * kLanes<T>) +
           3 * Arena::bytes_for<T>(kLanes<T>);
  }
  void allocate(const AttentionParams& p, Arena& arena) {
    this->query_t = arena.take<T>(p.head_dim * kLanes<T>);
    out_t = arena.take<T>(p.value_dim * kLanes<T>);
    row_max = arena.take<T>(kLanes<T>);
    row_sum = arena.take<T>(kLanes<T>);
    rescale = arena.take<T>(kLanes<T>);
  }

  // An attention sink (Xiao et al. 2023) is a score without a value: the softmax starts from it.
  void reset(const AttentionParams& p) {
    const T nothing = -std::numeric_limits<T>::infinity();
    const T sink = p.sinks.data != nullptr ? head_scalar<T>(p.sinks, this->batch, this->head) : nothing;
    for (int64_t lane = 0; lane < this->vecs * Simd<T>::kWidth; ++lane) {
      row_max[lane] = sink;
      row_sum[lane] = sink == nothing ? T(0) : T(1);
    }
    for (int64_t e = 0; e < p.value_dim; ++e) {
      memset(out_t + e * kLanes<T>, 0, static_cast<size_t>(this->vecs) * Simd<T>::kWidth * sizeof(T));
    }
  }
};

// Turns a block of scores into unnormalised weights in place and moves the running maximum and sum on.
template <class T>
void softmax_block(const ForwardStrip<T>& strip, int64_t keys, T* s) {
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const auto nothing = S::set(-std::numeric_limits<T>::infinity());
  for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
    T* column = s + lane;
    const auto old_max = S::load(strip.row_max + lane);
    // Four maxima and four sums: one chain would wait for its own latency.
    typename S::Vec most[4] = {old_max, old_max, old_max, old_max};
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4) {
      SELFATTN_UNROLL
      for (int i = 0; i < 4; ++i) most[i] = S::max(S::load(column + (j + i) * ld), most[i]);
    }
    for (; j < keys; ++j) most[0] = S::max(S::load(column + j * ld), most[0]);
    const auto new_max = S::max(S::max(most[0], most[1]), S::max(most[2], most[3]));
    // Where nothing has been visible yet, subtracting -inf would make NaN of -inf scores.
    const auto shift = S::select(S::equal(new_max, nothing), S::set(T(0)), new_max);
    typename S::Vec sum[4] = {S::set(T(0)), S::set(T(0)), S::set(T(0)), S::set(T(0))};
    for (j = 0; j + 4 <= keys; j += 4) {
      SELFATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const auto weight = exp_nonpositive<T>(S::sub(S::load(column + (j + i) * ld), shift));
        S::store(column + (j + i) * ld, weight);
        sum[i] = S::add(sum[i], weight);
      }
    }
    for (; j < keys; ++j) {
      const auto weight = exp_nonpositive<T>(S::sub(S::load(column + j * ld), shift));
      S::store(column + j * ld, weight);
      sum[0] = S::add(sum[0], weight);
    }
    const auto block_sum = S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3]));
    const auto rescale = exp_nonpositive<T>(S::sub(old_max, shift));
    S::store(strip.row_sum + lane, S::fma(S::load(strip.row_sum + lane), rescale, block_sum));
    S::store(strip.row_max + lane, new_max);
    S::store(strip.rescale + lane, rescale);
  }
}

// visible[j][lane] = 0 where the score is -inf, 1 elsewhere; see multiply_visible.
template <class T>
void mark_visible(const QueryStrip<T>& strip, int64_t keys, const T* s, T* visible) {
  using S = Simd<T>;
  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      const int64_t at = j * kLanes<T> + lane;
      S::store(visible + at, S::select(S::equal(S::load(s + at), hidden), S::set(T(0)), S::set(T(1))));
    }
  }
}

template <class T>
struct ForwardTask {
  // Strips of one item share the key and value blocks that they pull through the cache, and their conversion where the
  // tensors do not hold T.
  static constexpr int64_t kStrips = 2;
  static constexpr int64_t kConvertedStrips = 4;

  const AttentionParams& p;
  const ForwardOutputs& outputs;
  int64_t strips_per_item;
  int64_t items_per_head;

  ForwardTask(const AttentionParams& params, const ForwardOutputs& out) : p(params), outputs(out) {
    strips_per_item = p.dtype == dtype_of<T>() ? kStrips : kConvertedStrips;
    const int64_t queries = strips_per_item * kLanes<T>;
    items_per_head = (p.queries + queries - 1) / queries;
  }
  int64_t items() const { return p.batch * p.heads * items_per_head; }

  struct Scratch {
    Arena arena;
    BlockScratch<T> block;
    T *scores, *visible, *key_buffer, *value_buffer, *scale;
    ForwardStrip<T> strips[kConvertedStrips];

    static int64_t bytes(const ForwardTask& task) {
      const AttentionParams& p = task.p;
      return BlockScratch<T>::bytes(false) + 2 * Arena::bytes_for<T>(kKeyBlock * kLanes<T>) +
             Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.head_dim)) +
             Arena::bytes_for<T>(kKeyBlock * round_up_to_vector<T>(p.value_dim)) + Arena::bytes_for<T>(kLanes<T>) +
             task.strips_per_item * ForwardStrip<T>::bytes(p);
    }
    explicit Scratch(const ForwardTask& task)
        : arena(bytes(task)),
          block(arena, false),
          scores(arena.take<T>(kKeyBlock * kLanes<T>)),
          visible(arena.take<T>(kKeyBlock * kLanes<T>)),
          key_buffer(arena.take<T>(kKeyBlock * round_up_to_vector<T>(task.p.head_dim))),
          value_buffer(arena.take<T>(kKeyBlock * round_up_to_vector<T>(task.p.value_dim))),
          scale(arena.take<T>(kLanes<T>)) {
      for (int64_t i = 0; i < task.strips_per_item; ++i) strips[i].allocate(task.p, arena);
    }
  };

  void operator()(int64_t item, Scratch& scratch) const {
    // Later queries see more keys under a causal mask: the longest items go first.
    const int64_t last = p.batch * p.heads * items_per_head - 1 - item;
    const int64_t head_index = last % (p.batch * p.heads), group = last / (p.batch * p.heads);
    const int64_t batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t begin = group * strips_per_item * kLanes<T>;
    int64_t end = begin + strips_per_item * kLanes<T>;
    if (end > p.queries) end = p.queries;
    int64_t strips = 0;
    for (int64_t first = begin; first < end; ++strips) {
      const int64_t count = strip_queries<T>(first, end);
      scratch.strips[strips].begin(p, batch, head, first, count);
      first += count;
    }
    run(batch, head, strips, scratch, false);
    // 0 * Inf or 0 * NaN of a hidden key shows as NaN: then once more, leaving hidden keys out of the sums.
    bool finite = true;
    for (int64_t i = 0; i < strips; ++i) {
      const auto& strip = scratch.strips[i];
      finite = finite && all_finite(strip.out_t, kLanes<T>, p.value_dim, strip.vecs * Simd<T>::kWidth);
    }
    if (!finite) run(batch, head, strips, scratch, true);
    for (int64_t i = 0; i < strips; ++i) finish(scratch.strips[i], scratch.scale);
  }

  void run(int64_t batch, int64_t head, int64_t strips, Scratch& scratch, bool leave_hidden_out) const {
    KeyRange range{p.keys, 0};
    for (int64_t i = 0; i < strips; ++i) {
      scratch.strips[i].reset(p);
      if (scratch.strips[i].keys.begin < range.begin) range.begin = scratch.strips[i].keys.begin;
      if (scratch.strips[i].keys.end > range.end) range.end = scratch.strips[i].keys.end;
    }
    const int64_t kv_head = p.kv_head(head);
    for (int64_t key = range.begin / kKeyBlock * kKeyBlock; key < range.end; key += kKeyBlock) {
      const int64_t block = p.keys - key < kKeyBlock ? p.keys - key : kKeyBlock;
      const Rows<T> keys = rows_as<T>(p.key, batch, kv_head, key, block, p.head_dim, false, scratch.key_buffer);
      const Rows<T> values = rows_as<T>(p.value, batch, kv_head, key, block, p.value_dim, false, scratch.value_buffer);
      for (int64_t i = 0; i < strips; ++i) {
        const ForwardStrip<T>& strip = scratch.strips[i];
        const int64_t rest = strip.keys.end - key;
        if (rest <= 0 || strip.keys.begin >= key + block) continue;
        const int64_t count = rest < block ? rest : block;
        if (!score_block(p, strip, key, count, keys, scratch.block, scratch.scores)) continue;
        if (leave_hidden_out) mark_visible(strip, count, scratch.scores, scratch.visible);
        softmax_block(strip, count, scratch.scores);
        if (p.dropout.enabled) apply_dropout(p.dropout, strip, key, count, scratch.scores);
        const Product<T> product{count,       values.data, values.stride,      scratch.scores, kLanes<T>,
                                 strip.out_t, kLanes<T>,   Update::kScaleAdd, strip.rescale};
        if (leave_hidden_out) {
          multiply_visible<T, true>(product, p.value_dim, strip.vecs, scratch.visible, kLanes<T>);
        } else {
          multiply<T, true>(product, p.value_dim, strip.vecs);
        }
      }
    }
  }

  void finish(const ForwardStrip<T>& strip, T* scale) const {
    for (int64_t lane = 0; lane < strip.vecs * Simd<T>::kWidth; ++lane) {
      scale[lane] = strip.row_sum[lane] == T(0) ? T(0) : T(1) / strip.row_sum[lane];
    }
    const int64_t row = (strip.batch * p.heads + strip.head) * p.queries + strip.first;
    memcpy(static_cast<T*>(outputs.row_max) + row, strip.row_max, static_cast<size_t>(strip.count) * sizeof(T));
    memcpy(static_cast<T*>(outputs.row_sum) + row, strip.row_sum, static_cast<size_t>(strip.count) * sizeof(T));
    void* out = element(outputs.out.data, p.dtype, outputs.out.offset(strip.batch, strip.head, strip.first));
    store_transposed<T>(out, p.dtype, outputs.out.stride[2], strip.count, p.value_dim, strip.out_t, kLanes<T>, scale);
  }
};

template <class T>
void attention_forward(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool& pool) {
  const ForwardTask<T> task(p, outputs);
  for_each_item(pool, task.items(), task);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
