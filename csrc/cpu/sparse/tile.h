// A tile of scores of selected keys: any queries of a batch element in the lanes of a strip, and any keys
// down its rows. Its rows are gathered first, so that strips and their products are those of fused/.
#pragma once

#include "../fused/forward_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The queries of a tile. All of their heads have one kv head.
template <class P>
struct TileRows {
  int64_t batch, kv_head, count = 0;
  int64_t head[kLanes<P>], query[kLanes<P>];

  void begin(int64_t batch_index, int64_t kv_head_index) {
    batch = batch_index;
    kv_head = kv_head_index;
    count = 0;
  }
  void add(int64_t head_index, int64_t query_index) {
    head[count] = head_index;
    query[count++] = query_index;
  }
  int64_t row(const AttentionParams& p, int64_t lane) const { return p.row(batch, head[lane], query[lane]); }
};

// The keys of a tile, ascending.
struct TileKeys {
  static constexpr int64_t kMost = 2 * kKeyBlock;  // of tiles of rows; those of strips have kKeyBlock
  int64_t count = 0;
  int64_t key[kMost];

  static TileKeys neighbours(int64_t first, int64_t count) {
    TileKeys keys;
    for (; keys.count < count; ++keys.count) keys.key[keys.count] = first + keys.count;
    return keys;
  }
  bool are_neighbours() const { return key[count - 1] - key[0] == count - 1; }
};

// Copies rows of a view, `count` of them at the offsets that offset_of(n) gives, to `to`, as numbers that the
// products of P take without another copy. Rows ahead are prefetched, as nothing else foresees them.
template <class P, class OffsetOf>
RowSource copied(const AttentionParams& p, const View& view, int64_t count, int64_t columns, char* to,
                 const OffsetOf& offset_of) {
  using T = Scalar<P>;
  constexpr int64_t kAhead = 8;
  const int64_t bytes = columns * size_of(p.dtype), padded = round_up_to_vector<T>(columns);
  const bool converts = kDirect<P> && p.dtype != dtype_of<T>();
  const auto row = [&](int64_t n) {
    return static_cast<const char*>(element(view.data, p.dtype, offset_of(n)));
  };
  if (!converts && bytes % kLine == 0) {  // a call for each row would cost more than its lines
    char* end = to;
    for (int64_t n = 0; n < count; ++n, end += bytes) {
      const char *from = row(n), *ahead = row(smaller(n + kAhead, count - 1));
      for (int64_t at = 0; at < bytes; at += kLine) {
        __builtin_prefetch(ahead + at);
        memcpy(end + at, from + at, kLine);
      }
    }
  } else {
    for (int64_t n = 0; n < count; ++n) {
      if (n + kAhead < count) prefetch_block(row(n + kAhead), 0, 1, bytes);
      if constexpr (kDirect<P>) {
        load_padded_row<T>(reinterpret_cast<T*>(to) + n * padded, row(n), p.dtype, columns, T(1));
      } else {
        memcpy(to + n * bytes, row(n), static_cast<size_t>(bytes));
      }
    }
  }
  if constexpr (kDirect<P>) return {to, dtype_of<T>(), padded, count, columns};
  return {to, p.dtype, columns, count, columns};
}

// Returns the bytes of `count` copied rows.
template <class P>
int64_t copied_bytes(const AttentionParams& p, int64_t count, int64_t columns) {
  if constexpr (kDirect<P>) return count * round_up_to_vector<P>(columns) * static_cast<int64_t>(sizeof(P));
  return count * columns * size_of(p.dtype);
}

// Returns the rows of a view shaped as query or out, copied to `to`.
template <class P>
RowSource gathered(const AttentionParams& p, const TileRows<P>& rows, const View& view, int64_t columns,
                   char* to) {
  return copied<P>(p, view, rows.count, columns, to,
                   [&](int64_t lane) { return view.offset(rows.batch, rows.head[lane], rows.query[lane]); });
}

// Returns the rows of a view of keys or values, where they lie if they are neighbours and not in pages, or
// copied to `to`.
template <class P>
RowSource gathered(const AttentionParams& p, int64_t batch, int64_t kv_head, const TileKeys& keys,
                   const View& view, int64_t columns, char* to) {
  if (keys.are_neighbours()) {
    return key_source(p, view, batch, kv_head, keys.key[0], keys.count, columns, to);
  }
  const auto copy = [&](const auto& offset_of) {
    return copied<P>(p, view, keys.count, columns, to, offset_of);
  };
  if (p.pages.table != nullptr) {
    return copy([&](int64_t j) { return offset_of_key(view, p.pages, batch, kv_head, keys.key[j]); });
  }
  const int64_t first = view.offset(batch, kv_head, 0), step = view.stride[2];
  return copy([&](int64_t j) { return first + keys.key[j] * step; });
}

enum class Shown { kNothing, kSome, kAll };

// Whether a query sees all keys of a tile, with scores that nothing is added to.
inline bool sees_whole_tile(const AttentionParams& p, int64_t query, const TileKeys& keys) {
  if (p.mask.data != nullptr || p.alibi_slopes.data != nullptr) return false;
  const KeyRange range = visible_keys(p, query, query);
  return range.begin <= keys.key[0] && range.end > keys.key[keys.count - 1];
}

// Fills bias[j * step] with what slopes and mask add to a query's scores, -inf where mask or windows hide
// one. Returns whether any is seen.
template <class T>
bool load_row_bias(const AttentionParams& p, int64_t batch, int64_t head, int64_t query, const TileKeys& keys,
                   T* bias, int64_t step) {
  constexpr T kHidden = -std::numeric_limits<T>::infinity();
  const bool masked = p.mask.data != nullptr, sloped = p.alibi_slopes.data != nullptr;
  const int64_t position = query + p.query_offset;
  const KeyRange range = visible_keys(p, query, query);
  const T slope = sloped ? head_scalar<T>(p.alibi_slopes, batch, head) : T(0);
  const void* mask = masked ? element(p.mask.data, p.mask.dtype, p.mask.offset(batch, head, query)) : nullptr;
  bool shown = false;
  for (int64_t j = 0; j < keys.count; ++j) {
    const int64_t key = keys.key[j];
    T sum = kHidden;
    if (key >= range.begin && key < range.end) {
      const T added = masked ? mask_bias<T>(mask, p.mask.dtype, key * p.mask.stride[3]) : T(0);
      const T far = static_cast<T>(position < key ? key - position : position - key);
      sum = added == kHidden || !sloped ? added : added - slope * far;
    }
    shown |= sum != kHidden;
    bias[j * step] = sum;
  }
  return shown;
}

// Fills bias[j][lane] with the bias of each row. It leaves the bias as it is if it returns kAll: then all
// scores are seen and stay as they are.
template <class P>
Shown load_bias(const AttentionParams& p, const TileRows<P>& rows, const TileKeys& keys, Scalar<P>* bias) {
  using T = Scalar<P>;
  bool whole = true;
  for (int64_t lane = 0; whole && lane < rows.count; ++lane) {
    whole = sees_whole_tile(p, rows.query[lane], keys);
  }
  if (whole) return Shown::kAll;
  bool shown = false;
  for (int64_t lane = 0; lane < round_up(rows.count, Simd<T>::kWidth); ++lane) {
    if (lane >= rows.count) {
      for (int64_t j = 0; j < keys.count; ++j) bias[j * kLanes<P> + lane] = T(0);
      continue;
    }
    shown |= load_row_bias(p, rows.batch, rows.head[lane], rows.query[lane], keys, bias + lane, kLanes<P>);
  }
  return shown ? Shown::kSome : Shown::kNothing;
}

// Computes the scores of a tile, s[j][lane], of the first `count` rows of key_rows from `from` on. The bias
// is in scratch.mask unless `shown` is kAll. Returns the factor that is still missing, as finish_scores does.
template <class P>
Scalar<P> tile_scores(const AttentionParams& p, QueryStrip<P>& strip, const RowOperand<P>& key_rows,
                      int64_t from, int64_t count, Shown shown, const BlockScratch<P>& scratch,
                      Scalar<P>* s) {
  dot_block<P>(strip, key_rows, from, count, p.head_dim, s);
  const bool scaled = strip.rest_of_scale != Scalar<P>(1), capped = p.softcap > 0.0;
  const bool biased = shown != Shown::kAll;
  if (!biased && !capped && !(kDirect<P> && scaled)) return strip.rest_of_scale;
  take_score_steps<P>(p, {scaled, capped, false, biased, false}, strip, 0, count, scratch, s);
  return Scalar<P>(1);
}

// Does what row_dropout does for keys that are neighbours, of which vectors hold many.
template <class T>
void row_dropout_of_neighbours(const Dropout& dropout, int64_t batch, int64_t head, int64_t query,
                               const TileKeys& keys, T kept, T* factors, int64_t step) {
  using S = Simd<T>;
  const RowDropout<T> pattern(dropout, batch, head, query, kept);
  const int64_t first = keys.key[0], end = first + keys.count;
  for (int64_t key = first / 4 * 4; key < end; key += 4 * S::kWidth) {
    typename S::Vec factor[4];
    pattern.factors(key, factor);
    T row[4 * S::kWidth];
    for (int64_t i = 0; i < 4; ++i) S::store(row + i * S::kWidth, factor[i]);
    for (int64_t n = larger(key, first); n < smaller(key + 4 * S::kWidth, end); ++n) {
      factors[(n - first) * step] = row[n - key];
    }
  }
}

// Fills factors[j * step] with 0, or `kept` where dropout keeps the weight of a query and a key.
template <class T>
void row_dropout(const Dropout& dropout, int64_t batch, int64_t head, int64_t query, const TileKeys& keys,
                 T kept, T* factors, int64_t step) {
  if (keys.are_neighbours()) {
    row_dropout_of_neighbours(dropout, batch, head, query, keys, kept, factors, step);
    return;
  }
  const DropoutOrigin origin = dropout_origin(dropout);
  const uint64_t seed = static_cast<uint64_t>(*dropout.seed);
  const uint64_t threshold = dropout_threshold(dropout.probability);
  int64_t group = -1;
  Philox4 random{};
  for (int64_t j = 0; j < keys.count; ++j) {
    if (keys.key[j] / 4 != group) {
      group = keys.key[j] / 4;
      random = philox(seed, origin.key_group + static_cast<uint32_t>(group),
                      origin.query + static_cast<uint32_t>(query), origin.head + static_cast<uint32_t>(head),
                      origin.batch + static_cast<uint32_t>(batch));
    }
    factors[j * step] = random.word[keys.key[j] % 4] < threshold ? T(0) : kept;
  }
}

// Does the same for all rows, factors[j][lane]. Lanes without a row get 0.
template <class P>
void tile_dropout(const Dropout& dropout, const TileRows<P>& rows, const TileKeys& keys, Scalar<P> kept,
                  Scalar<P>* factors) {
  using T = Scalar<P>;
  for (int64_t lane = 0; lane < round_up(rows.count, Simd<T>::kWidth); ++lane) {
    if (lane < rows.count) {
      row_dropout(dropout, rows.batch, rows.head[lane], rows.query[lane], keys, kept, factors + lane,
                  kLanes<P>);
    } else {
      for (int64_t j = 0; j < keys.count; ++j) factors[j * kLanes<P> + lane] = T(0);
    }
  }
}

// Multiplies a tile by factors.
template <class P>
void multiply_tile_by(int64_t keys, int64_t vecs, const Scalar<P>* factors, Scalar<P>* tile) {
  using S = Simd<Scalar<P>>;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t at = j * kLanes<P>; at < j * kLanes<P> + vecs * S::kWidth; at += S::kWidth) {
      S::store(tile + at, S::mul(S::load(tile + at), S::load(factors + at)));
    }
  }
}

// Rows of sums, one for each query or key of an item.
template <class T>
struct RowSums {
  T* data;
  int64_t stride;  // whole vectors
};

// Sets row at[lane] of the sums to itself times factor[lane], plus lane `lane` of source [columns][kLanes].
template <class P>
void add_transposed(const RowSums<Scalar<P>>& sums, const int64_t* at, int64_t rows, int64_t columns,
                    const Scalar<P>* source, const Scalar<P>* factor) {
  using T = Scalar<P>;
  using S = Simd<T>;
  for (int64_t lane = 0; lane < rows; lane += S::kWidth) {
    const int64_t lanes = smaller(rows - lane, S::kWidth);
    for (int64_t column = 0; column < columns; column += S::kWidth) {
      const int64_t n = smaller(columns - column, S::kWidth);
      typename S::Vec tile[S::kWidth];
      for (int64_t i = 0; i < S::kWidth; ++i) {
        tile[i] = i < n ? S::load(source + (column + i) * kLanes<P> + lane) : S::set(T(0));
      }
      transpose<T>(tile);
      for (int64_t i = 0; i < lanes; ++i) {
        T* to = sums.data + at[lane + i] * sums.stride + column;
        S::store(to, S::fma(S::load(to), S::set(factor[lane + i]), tile[i]));
      }
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
