// A strip is a few vectors of neighbouring queries of one (batch, head), one query per lane. Everything about
// a strip is kept transposed: a block of scores is S^T, keys down the rows and queries across the lanes.
// Maximum, sum and masks of a row of the softmax are then plain vertical vector operations, and keys and
// values are used as they lie in memory.
#pragma once

#include "elementary.h"
#include "rows.h"
#include "thin_product.h"
#include "tile_multiply.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kKeyBlock = 64;  // keys per block of scores; a multiple of 4, the keys of one Philox call

template <class T>
constexpr int64_t kLanes =
    Simd<T>::kTileVecs * Simd<T>::kWidth;  // most queries of a strip, and every leading dimension

// Scratch memory in one aligned piece, handed out front to back.
class Arena {
 public:
  explicit Arena(int64_t bytes) : memory_(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
  ~Arena() { ::operator delete(memory_, std::align_val_t(64)); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ + used_;
    used_ += bytes_for<T>(count);
    return reinterpret_cast<T*>(piece);
  }
  template <class T>
  static int64_t bytes_for(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Buffers that one strip after another can use: they hold one block.
template <class T>
struct BlockScratch {
  T* mask;       // [kKeyBlock][kLanes] additive mask, -inf where hidden
  T* first_key;  // [kLanes] first and one past the last key of the block that the lane's query may see, by
                 // position
  T* end_key;    // [kLanes]
  T* capped;     // [kKeyBlock][kLanes] tanh of the softcap, kept for the backward; nullptr in the forward

  static int64_t bytes(bool backward) {
    return Arena::bytes_for<T>(kKeyBlock * kLanes<T>) * (backward ? 2 : 1) +
           2 * Arena::bytes_for<T>(kLanes<T>);
  }
  BlockScratch(Arena& arena, bool backward)
      : mask(arena.take<T>(kKeyBlock * kLanes<T>)),
        first_key(arena.take<T>(kLanes<T>)),
        end_key(arena.take<T>(kLanes<T>)),
        capped(backward ? arena.take<T>(kKeyBlock * kLanes<T>) : nullptr) {}
};

template <class T>
T head_scalar(const HeadScalars& scalars, int64_t batch, int64_t head) {
  return static_cast<const T*>(scalars.data)[batch * scalars.batch_stride + head * scalars.head_stride];
}

// The queries first .. first + count - 1 of (batch, head).
template <class T>
struct QueryStrip {
  int64_t batch, head, first, count;
  int64_t vecs;   // vectors in use
  KeyRange keys;  // all keys that some query of the strip may see by position
  bool thin;      // see thin_product.h
  T* query_t;     // [head_dim][kLanes] scale * Q^T; of a thin strip [count][padded head_dim] scale * Q

  static int64_t query_size(const AttentionParams& p) {
    return round_up_to_vector<T>(p.head_dim) * kLanes<T>;
  }

  void begin(const AttentionParams& p, int64_t batch_index, int64_t head_index, int64_t first_query,
             int64_t queries) {
    batch = batch_index;
    head = head_index;
    first = first_query;
    count = queries;
    vecs = (queries + Simd<T>::kWidth - 1) / Simd<T>::kWidth;
    keys = visible_keys(p, first, first + count - 1);
    thin = p.queries <= kThinQueries;
    const void* source = element(p.query.data, p.dtype, p.query.offset(batch, head, first));
    if (thin) {
      load_rows<T>(query_t, source, p.dtype, p.query.stride[2], count, p.head_dim, static_cast<T>(p.scale));
    } else {
      load_transposed<T>(query_t, kLanes<T>, source, p.dtype, p.query.stride[2], count, p.head_dim,
                         static_cast<T>(p.scale));
    }
  }
};

// How many queries the strip that starts at `first` takes. Depends on the number of queries only.
template <class T>
int64_t strip_queries(int64_t first, int64_t queries) {
  const int64_t rest = queries - first;
  const int64_t vecs = (rest + Simd<T>::kWidth - 1) / Simd<T>::kWidth;
  const int64_t take = next_tile_vecs<T>(vecs) * Simd<T>::kWidth;
  return take < rest ? take : rest;
}

// The mask of a block, transposed, as numbers to add; -inf hides. Returns whether any position is visible.
template <class T>
bool load_mask_block(const AttentionParams& p, const QueryStrip<T>& strip, int64_t key, int64_t keys,
                     T* mask) {
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const T hidden = -std::numeric_limits<T>::infinity();
  const bool boolean = p.mask.dtype == DType::kBool;
  const int64_t row_stride = p.mask.stride[2], key_stride = p.mask.stride[3];
  const void* source = element(p.mask.data, p.mask.dtype,
                               p.mask.offset(strip.batch, strip.head, strip.first) + key * key_stride);
  const auto value = [&](int64_t index) {
    const T x = load_element<T>(source, p.mask.dtype, index);
    return boolean ? (x != T(0) ? T(0) : hidden) : x;
  };
  const int64_t lanes = strip.vecs * S::kWidth;
  if (row_stride == 0) {
    for (int64_t j = 0; j < keys; ++j) {
      const auto x = S::set(value(j * key_stride));
      for (int64_t lane = 0; lane < lanes; lane += S::kWidth) S::store(mask + j * ld + lane, x);
    }
  } else if (key_stride == 1 && !boolean) {
    load_transposed<T>(mask, ld, source, p.mask.dtype, row_stride, strip.count, keys, T(1));
  } else if (key_stride == 1 && sizeof(T) == 4) {
    if constexpr (sizeof(T) == 4)
      load_bool_transposed(mask, static_cast<const uint8_t*>(source), row_stride, strip, keys);
  } else {
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        mask[j * ld + lane] = lane < strip.count ? value(lane * row_stride + j * key_stride) : T(0);
      }
    }
  }
  auto visible = S::less(S::set(T(0)), S::set(T(0)));
  for (int64_t lane = 0; lane < lanes; lane += S::kWidth) {
    // Lanes past the last query hold zeros; they must not make a hidden block look visible.
    T buffer[S::kWidth];
    auto largest = S::set(hidden);
    for (int64_t j = 0; j < keys; ++j) {
      const auto x = S::load(mask + j * ld + lane);
      largest = S::select(S::equal(x, S::set(hidden)), largest, S::set(T(0)));
    }
    if (lane + S::kWidth > strip.count) {
      S::store(buffer, largest);
      for (int64_t i = strip.count - lane; i < S::kWidth; ++i) buffer[i] = hidden;
      largest = S::load(buffer);
    }
    visible = S::either(visible, S::less(S::set(hidden), largest));
  }
  return S::any(visible);
}

template <class T>
void load_bool_transposed(T* mask, const uint8_t* source, int64_t row_stride, const QueryStrip<T>& strip,
                          int64_t keys) {
  using S = Simd<T>;
  for (int64_t lane = 0; lane < strip.count; lane += S::kWidth) {
    for (int64_t j = 0; j < keys; j += S::kWidth) {
      const int64_t n = keys - j < S::kWidth ? keys - j : S::kWidth;
      typename S::Vec tile[S::kWidth];
      for (int i = 0; i < S::kWidth; ++i) {
        uint8_t bytes[S::kWidth];
        const uint8_t* row = bytes;
        if (lane + i < strip.count && n == S::kWidth) {
          row = source + (lane + i) * row_stride + j;
        } else {
          memset(bytes, 1, sizeof(bytes));
          if (lane + i < strip.count)
            memcpy(bytes, source + (lane + i) * row_stride + j, static_cast<size_t>(n));
        }
        tile[i] = S::load_bool_bias(row);
      }
      transpose<T>(tile);
      for (int64_t i = 0; i < n; ++i) S::store(mask + (j + i) * kLanes<T> + lane, tile[i]);
    }
  }
}

// Fills first_key/end_key for the block. Returns whether some lane's window does not cover it.
template <class T>
bool window_of_block(const AttentionParams& p, const QueryStrip<T>& strip, int64_t key, int64_t keys,
                     const BlockScratch<T>& scratch) {
  const KeyRange low = visible_keys(p, strip.first, strip.first);
  const KeyRange high = visible_keys(p, strip.first + strip.count - 1, strip.first + strip.count - 1);
  // Windows move with the query: the last query's begins latest and the first query's ends earliest.
  if (high.begin <= key && low.end >= key + keys) return false;
  for (int64_t lane = 0; lane < strip.vecs * Simd<T>::kWidth; ++lane) {
    const KeyRange range = visible_keys(p, strip.first + lane, strip.first + lane);
    const auto within = [&](int64_t k) {
      return static_cast<T>(k < key ? 0 : (k > key + keys ? keys : k - key));
    };
    scratch.first_key[lane] = within(range.begin);
    scratch.end_key[lane] = within(range.end);
  }
  return true;
}

// s[j][lane] = scale * <query, key>, leading dimension kLanes. Every pass gets its scores here, in one order
// of summation: the backward's exp(s - row_max) is exact where it matters only if s is the forward's to the
// last bit.
template <class T>
void dot_block(const QueryStrip<T>& strip, const Rows<T>& key_rows, int64_t keys, int64_t head_dim, T* s) {
  constexpr int64_t ld = kLanes<T>;
  if (strip.thin) {
    thin_scores<T>(strip.query_t, strip.count, key_rows.data, key_rows.stride, keys, head_dim, s, ld);
  } else {
    multiply<T, false>(
        {head_dim, key_rows.data, key_rows.stride, strip.query_t, ld, s, ld, Update::kStore, nullptr}, keys,
        strip.vecs);
  }
}

// Scores of keys key .. key + keys - 1, final up to the softmax, -inf where hidden: s[j][lane], leading
// dimension kLanes. Returns false, with s untouched, when the mask hides the whole block.
template <class T>
bool score_block(const AttentionParams& p, const QueryStrip<T>& strip, int64_t key, int64_t keys,
                 const Rows<T>& key_rows, const BlockScratch<T>& scratch, T* s) {
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const bool masked = p.mask.data != nullptr;
  if (masked && !load_mask_block(p, strip, key, keys, scratch.mask)) return false;

  dot_block(strip, key_rows, keys, p.head_dim, s);

  const bool windowed = window_of_block(p, strip, key, keys, scratch);
  const bool capped = p.softcap > 0.0;
  const bool sloped = p.alibi_slopes.data != nullptr;
  if (!masked && !windowed && !capped && !sloped) return true;

  const auto hidden = S::set(-std::numeric_limits<T>::infinity());
  const auto cap = S::set(static_cast<T>(p.softcap));
  const auto inverse_cap = S::set(static_cast<T>(capped ? 1.0 / p.softcap : 0.0));
  const auto slope = S::set(sloped ? head_scalar<T>(p.alibi_slopes, strip.batch, strip.head) : T(0));
  T lane_index[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) lane_index[i] = static_cast<T>(i);
  const auto lanes = S::load(lane_index);
  // Distances are taken from the block's corner as an integer first, so that they are exact at any position.
  const int64_t corner = strip.first + p.query_offset - key;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t v = 0; v < strip.vecs; ++v) {
      T* at = s + j * ld + v * S::kWidth;
      auto x = S::load(at);
      if (capped) {
        const auto t = tanh<T>(S::mul(x, inverse_cap));
        if (scratch.capped != nullptr) S::store(scratch.capped + j * ld + v * S::kWidth, t);
        x = S::mul(cap, t);
      }
      if (sloped) {
        const auto distance = S::abs(S::add(S::set(static_cast<T>(corner + v * S::kWidth - j)), lanes));
        x = S::sub(x, S::mul(slope, distance));
      }
      if (masked) {
        const auto bias = S::load(scratch.mask + j * ld + v * S::kWidth);
        x = S::select(S::equal(bias, hidden), hidden, S::add(x, bias));
      }
      if (windowed) {
        const auto index = S::set(static_cast<T>(j));
        const auto before = S::less(index, S::load(scratch.first_key + v * S::kWidth));
        const auto inside = S::less(index, S::load(scratch.end_key + v * S::kWidth));
        x = S::select(inside, S::select(before, hidden, x), hidden);
      }
      S::store(at, x);
    }
  }
  return true;
}

// Multiplies a block of weights by 0 or 1/(1-p). `key` is a multiple of 4.
template <class T>
void apply_dropout(const Dropout& dropout, const QueryStrip<T>& strip, int64_t key, int64_t keys,
                   T* weights) {
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<T>;
  const uint64_t seed = static_cast<uint64_t>(*dropout.seed);
  const uint64_t exact_threshold = dropout_threshold(dropout.probability);
  // A threshold of 2^32 drops everything, which keep = 0 does as well.
  const uint32_t threshold =
      exact_threshold > 0xffffffffu ? 0xffffffffu : static_cast<uint32_t>(exact_threshold);
  const T keep = static_cast<T>(dropout_keep_scale(dropout.probability));
  for (int64_t j = 0; j < keys; j += 4) {
    for (int64_t lane = 0; lane < strip.vecs * S::kWidth; lane += S::kWidth) {
      uint32_t c0[S::kWidth], c1[S::kWidth], c2[S::kWidth], c3[S::kWidth];
      for (int i = 0; i < S::kWidth; ++i) {
        c0[i] = static_cast<uint32_t>((key + j) >> 2);
        c1[i] = static_cast<uint32_t>(strip.first + lane + i);
        c2[i] = static_cast<uint32_t>(strip.head);
        c3[i] = static_cast<uint32_t>(strip.batch);
      }
      uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
      for (int round = 0; round < kPhiloxRounds; ++round) {
        for (int i = 0; i < S::kWidth;
             ++i) {  // the compiler makes vectors of this; core/philox.h says what it computes
          const uint64_t p0 = static_cast<uint64_t>(kPhiloxMultiplier0) * c0[i];
          const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c2[i];
          const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
          const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
          c1[i] = static_cast<uint32_t>(p1);
          c3[i] = static_cast<uint32_t>(p0);
          c0[i] = next0;
          c2[i] = next2;
        }
        k0 += kPhiloxWeyl0;
        k1 += kPhiloxWeyl1;
      }
      const uint32_t* words[4] = {c0, c1, c2, c3};
      for (int64_t w = 0; w < 4 && j + w < keys; ++w) {
        T* at = weights + (j + w) * ld + lane;
        const uint32_t* word = words[w];
        for (int i = 0; i < S::kWidth; ++i) at[i] *= word[i] < threshold ? T(0) : keep;
      }
    }
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
