// The products of thin_scores.h and thin_values.h for bfloat16 by tiles, where sixteen queries cost what one
// does.
//
//     S = K · Qᵀ        keys are the rows of a tile, where they lie; queries its lanes
//     O += P · V        queries are the rows, columns of values the lanes; two keys make a pair
//
// An instruction sums up 32 elements of a key, or 32 keys of a column, by itself before it adds them. A score
// does not depend on its neighbours whatever their number; for sums over keys every call begins at a
// multiple of 32 keys of its block.
#pragma once

#include "thin_products.h"
#include "thin_weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kTileRowsOf = 16, kTileKeys = 32, kTileWords = 256;

// Tiles 0 and 1 are sums of values and 2 their weights, with as many rows as there are queries, sixteen at
// most; all others are whole.
class ThinTiles : public PairEngine {
 public:
  void take_rows(int64_t rows) {
    const int count = static_cast<int>(rows < 16 ? rows : 16);
    if (count == rows_) return;
    rows_ = count;
    configure(3, count);
  }

 private:
  int rows_ = 16;
};

// Sixteen keys at most, and what is to be asked for while they are used.
struct KeyTile {
  const char *rows[kTileRowsOf], *soon[kTileRowsOf];
  int64_t count;
  int64_t step;  // from row to row, 0 if they are not evenly spaced or too few

  KeyTile(RowWalk& walk, RowsAhead& ahead, int64_t n) : count(n), step(0) {
    if (n == kTileRowsOf && walk.even() >= n) {
      const RowRun run = walk.take(n);
      rows[0] = run.first;
      step = run.step;
    } else {
      for (int64_t i = 0; i < n; ++i) rows[i] = walk.next();
    }
    if (ahead.even() >= n) {
      const RowRun run = ahead.take(n);
      for (int64_t i = 0; i < n; ++i) soon[i] = run.first + i * run.step;
    } else {
      for (int64_t i = 0; i < n; ++i) soon[i] = ahead.next();
    }
  }
};

// Asks for a part of the lines of `soon`, in the order of memory.
SELFATTN_INLINE void fetch_part(const KeyTile& tile, int64_t row_bytes, int64_t part, int64_t parts) {
  const int64_t first = tile.count * part / parts, end = tile.count * (part + 1) / parts;
  for (int64_t i = first; i < end; ++i) {
    for (int64_t byte = 0; byte < row_bytes; byte += 64) fetch_ahead(tile.soon[i] + byte);
  }
}

// 32 elements of the keys of a tile as rows of `copy`; zeros past the row's end and the last key.
inline void copy_keys(const KeyTile& tile, int64_t element, int64_t head_dim, uint16_t* copy) {
  const int64_t n = head_dim - element;
  const __mmask32 mask = n >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint32_t{1} << n) - 1);
  for (int64_t i = 0; i < kTileRowsOf; ++i) {
    const int64_t row = tile.step != 0 ? 0 : i;
    const char* from = tile.rows[row] + (tile.step != 0 ? i * tile.step : 0) + element * 2;
    const __m512i x = i < tile.count ? _mm512_maskz_loadu_epi16(mask, from) : _mm512_setzero_si512();
    _mm512_store_si512(copy + i * 32, x);
  }
}

// The dot products of kTiles times sixteen keys with sixteen queries: dots[key][query].
template <int kTiles>
SELFATTN_INLINE void tile_dots(const uint16_t* query, const KeyTile* keys, int64_t head_dim, bool fetches,
                               float* dots) {
  alignas(64) uint16_t copy[2][kTileRowsOf * 32];
  const int64_t parts = padded_depth(head_dim) / 32;
  const bool whole = head_dim % 32 == 0;
  tile_zero<3>();
  if constexpr (kTiles > 1) tile_zero<4>();
  const auto add = [&](auto c, int64_t part) {
    constexpr int kC = decltype(c)::value, kA = 5 + kC;
    const KeyTile& tile = keys[kC];
    if (fetches) fetch_part(tile, head_dim * 2, part, parts);
    if (whole && tile.step != 0) {
      tile_load<kA>(tile.rows[0] + part * 64, tile.step);
    } else {
      copy_keys(tile, part * 32, head_dim, copy[kC]);
      tile_load<kA>(copy[kC], 64);
    }
    tile_dot<3 + kC, kA, 7>();
  };
  for (int64_t part = 0; part < parts; ++part) {
    tile_load<7>(query + part * 2 * kTileWords, 64);
    add(std::integral_constant<int, 0>{}, part);
    if constexpr (kTiles > 1) add(std::integral_constant<int, 1>{}, part);
  }
  tile_store<3>(dots, 64);
  if constexpr (kTiles > 1) tile_store<4>(dots + kTileWords, 64);
}

// s[query][key] = scale * dots[key][query] of up to sixteen keys and queries.
inline void store_scores(const float* dots, int64_t queries, int64_t keys, __m512 scale, float* s,
                         int64_t ld) {
  const __mmask16 mask = lanes_below(keys);
  constexpr int64_t kFew = 4;  // for which a transpose of all sixteen takes longer
  if (queries <= kFew) {
    const __m512i key = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(16));
    for (int64_t r = 0; r < queries; ++r) {
      const __m512 x = _mm512_i32gather_ps(key, dots + r, 4);
      _mm512_mask_storeu_ps(s + r * ld, mask, _mm512_mul_ps(x, scale));
    }
    return;
  }
  __m512 rows[16];
  SELFATTN_UNROLL
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_ps(dots + i * 16);
  transpose<float>(rows);
  alignas(64) float by_query[16 * 16];
  SELFATTN_UNROLL
  for (int i = 0; i < 16; ++i) _mm512_store_ps(by_query + i * 16, rows[i]);
  for (int64_t r = 0; r < queries; ++r) {
    _mm512_mask_storeu_ps(s + r * ld, mask, _mm512_mul_ps(_mm512_load_ps(by_query + r * 16), scale));
  }
}

// Pairs of neighbouring keys in tiles: of 32 columns, the first tile holds those below 4 of every 8, the
// second the others. That is the order in which they are interleaved within 128 bits, by one instruction; see
// ThinProducts::load_sums.
class ValueTiles {
 public:
  static constexpr int64_t kMostColumns = 128;

  explicit ValueTiles(int64_t columns) : groups_((columns + 31) / 32), columns_(columns) {}
  int64_t tiles() const { return groups_ * 2; }
  const uint32_t* tile(int64_t step, int64_t index) const {
    return words_ + (step * tiles() + index) * kTileWords;
  }

  // 32 keys, or those that are left and zeros, from column `at` on. `visible` as in ThinValues.
  void load(int64_t step, int64_t at, ThinRows& values, const float* visible) {
    int64_t pair = 0;
    for (int64_t key = 0; key < kTileKeys && values.count > 0;) {
      const ThinRows::Even some = values.take_even(kTileKeys - key);
      for (int64_t j = 0; j < some.rows.rows; j += 2, ++pair) {
        const char* above = some.rows.first + j * some.rows.step + at * 2;
        const char* soon = some.soon.first + j * some.soon.step + at * 2;
        const bool two = j + 1 < some.rows.rows;
        const bool takes_first = visible == nullptr || visible[key + j] != 0.0f;
        const bool takes_second = two && (visible == nullptr || visible[key + j + 1] != 0.0f);
        load_pair(step, pair, above, takes_first, two ? above + some.rows.step : above, takes_second, soon,
                  soon + some.soon.step);
      }
      key += some.rows.rows;
    }
    for (; pair < 16; ++pair) {
      for (int64_t i = 0; i < tiles(); ++i) _mm512_store_si512(row(step, i, pair), _mm512_setzero_si512());
    }
  }

 private:
  int64_t groups_, columns_;  // two steps, in the level-1 cache
  alignas(64) uint32_t words_[2 * kMostColumns / 16 * kTileWords];

  uint32_t* row(int64_t step, int64_t index, int64_t pair) {
    return words_ + (step * tiles() + index) * kTileWords + pair * 16;
  }
  SELFATTN_INLINE void load_pair(int64_t step, int64_t pair, const char* above, bool takes_above,
                                 const char* below, bool takes_below, const char* soon_above,
                                 const char* soon_below) {
    uint32_t* to = row(step, 0, pair);
    const auto store = [&](int64_t group, __mmask32 first, __mmask32 second) {
      const __m512i a = _mm512_maskz_loadu_epi16(first, above + group * 64);
      const __m512i b = _mm512_maskz_loadu_epi16(second, below + group * 64);
      _mm512_store_si512(to + group * 2 * kTileWords, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + (group * 2 + 1) * kTileWords, _mm512_unpackhi_epi16(a, b));
    };
    const int64_t whole = columns_ / 32;
    const __mmask32 all = ~__mmask32{0};
    if (takes_above && takes_below) {
      for (int64_t group = 0; group < whole; ++group) {
        fetch_ahead(soon_above + group * 64);
        fetch_ahead(soon_below + group * 64);
        store(group, all, all);
      }
    } else {
      for (int64_t group = 0; group < whole; ++group)
        store(group, takes_above ? all : 0, takes_below ? all : 0);
    }
    if (whole == groups_) return;
    const __mmask32 tail = static_cast<__mmask32>((uint32_t{1} << columns_ % 32) - 1);
    store(whole, takes_above ? tail : 0, takes_below ? tail : 0);
  }
};

template <>
struct ThinProducts<Pairs> {
  using Query = uint16_t;
  using Session = ThinTiles;
  static constexpr int64_t kStepKeys = kTileKeys;
  static constexpr int64_t kSpareRows = kTileRowsOf - 1;  // a tile takes as many rows of weights

  static int64_t sums_rows(int64_t rows) { return rows < 16 ? rows : padded_rows(rows); }

  // [16 queries][32 elements][pair][query]
  static int64_t queries_size(const AttentionParams& p) {
    return padded_rows(p.heads / p.kv_heads * p.queries) * padded_depth(p.head_dim);
  }
  static void load_queries(const AttentionParams& p, int64_t batch, int64_t first_head, Query* to) {
    const int64_t depth = padded_depth(p.head_dim);
    memset(to, 0, static_cast<size_t>(queries_size(p)) * sizeof(Query));
    int64_t lane = 0;
    for (int64_t head = first_head; head < first_head + p.heads / p.kv_heads; ++head) {
      for (int64_t i = 0; i < p.queries; ++i, ++lane) {
        const auto* from = static_cast<const uint16_t*>(p.query.data) + p.query.offset(batch, head, i);
        Query* tiles = to + lane / 16 * 16 * depth + lane % 16 * 2;
        for (int64_t e = 0; e < p.head_dim; ++e) tiles[e / 2 * 32 + e % 2] = from[e];
      }
    }
  }

  static void scores(const AttentionParams& p, const Query* query, int64_t rows, const ThinRows& keys,
                     float* s, int64_t ld) {
    alignas(64) float dots[2 * kTileWords];
    const __m512 scale = _mm512_set1_ps(static_cast<float>(p.scale));
    const int64_t depth = padded_depth(p.head_dim);
    RowWalk walk = keys.rows;
    RowsAhead ahead = keys.soon;
    for (int64_t key = 0; key < keys.count;) {
      const int64_t left = keys.count - key, tiles = left > 16 ? 2 : 1;
      const int64_t taken = left < tiles * 16 ? left : tiles * 16;
      const auto tile = [&](int64_t i) {
        const int64_t n = taken - i * 16;
        return KeyTile(walk, ahead, n > 16 ? 16 : n);
      };
      if (tiles == 2) {
        const KeyTile of_keys[2] = {tile(0), tile(1)};
        add_scores<2>(of_keys, p, query, rows, depth, scale, dots, s + key, ld);
      } else {
        const KeyTile of_keys[1] = {tile(0)};
        add_scores<1>(of_keys, p, query, rows, depth, scale, dots, s + key, ld);
      }
      key += taken;
    }
  }

  static float round_weights(int64_t keys, float* weights) { return round_to_pairs(keys, weights); }

  using Values = ThinValues<float, uint32_t>;
  static Values weigh(const float* weights, const float* visible, int64_t ld, int64_t value_dim, float* sums,
                      int64_t ld_sums) {
    return {reinterpret_cast<const uint32_t*>(weights), visible, ld, value_dim, sums, ld_sums};
  }
  static void values(const Values& a, int64_t rows, const ThinRows& values) {
    for (int64_t at = 0; at < a.value_dim; at += ValueTiles::kMostColumns) {
      const int64_t left = a.value_dim - at;
      ValueTiles tiles(left < ValueTiles::kMostColumns ? left : ValueTiles::kMostColumns);
      if (a.visible == nullptr) {
        add_values(a, 0, rows, values, at, tiles, nullptr, a.sums + at, a.ld_sums);
        continue;
      }
      // What is to be left out differs from row to row.
      alignas(64) float sums[16 * ValueTiles::kMostColumns];
      const size_t bytes = static_cast<size_t>(tiles.tiles()) * 16 * sizeof(float);
      memset(sums, 0, sizeof(sums));
      for (int64_t r = 0; r < rows; ++r) {
        memcpy(sums, a.sums + r * a.ld_sums + at, bytes);
        add_values(a, r, 1, values, at, tiles, a.visible + r * a.ld, sums, ValueTiles::kMostColumns);
        memcpy(a.sums + r * a.ld_sums + at, sums, bytes);
      }
    }
  }
  // Sixteen columns' sums in their order.
  static SELFATTN_INLINE __m512 load_sums(const float* sums, int64_t column) {
    const float* group = sums + column / 32 * 32;
    const int first = static_cast<int>(column % 32) / 2;
    const __m512i index = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), _mm512_set1_epi32(first));
    return _mm512_permutex2var_ps(_mm512_loadu_ps(group), index, _mm512_loadu_ps(group + 16));
  }

 private:
  template <int kTiles>
  static void add_scores(const KeyTile* keys, const AttentionParams& p, const Query* query, int64_t rows,
                         int64_t depth, __m512 scale, float* dots, float* s, int64_t ld) {
    for (int64_t row = 0; row < rows; row += 16) {
      tile_dots<kTiles>(query + row * depth, keys, p.head_dim, row == 0, dots);
      const int64_t n = rows - row < 16 ? rows - row : 16;
      for (int i = 0; i < kTiles; ++i) {
        store_scores(dots + i * kTileWords, n, keys[i].count, scale, s + row * ld + i * 16, ld);
      }
    }
  }

  // sums[row] += those of the weights from row `first` on, of the columns of `tiles`. While a step is
  // multiplied the next one's words are on their way to the cache: tiles are not loaded from stores under
  // way.
  static void add_values(const Values& a, int64_t first, int64_t rows, ThinRows values, int64_t at,
                         ValueTiles& tiles, const float* visible, float* sums, int64_t ld) {
    tiles.load(0, at, values, visible);
    int64_t key = 0;
    for (int step = 0;; step = 1 - step, key += kTileKeys) {
      const bool more = values.count > 0;
      if (more) tiles.load(1 - step, at, values, visible != nullptr ? visible + key + kTileKeys : nullptr);
      for (int64_t row = 0; row < rows; row += 16) {
        const uint32_t* weights = a.weights + (first + row) * a.ld + key / 2;
        tile_load<2>(weights, a.ld * 4);
        for (int64_t i = 0; i < tiles.tiles(); i += 2) {
          float* to = sums + row * ld + i * 16;
          tile_load<0>(to, ld * 4);
          tile_load<5>(tiles.tile(step, i), 64);
          tile_dot<0, 2, 5>();
          tile_store<0>(to, ld * 4);
          tile_load<1>(to + 16, ld * 4);
          tile_load<6>(tiles.tile(step, i + 1), 64);
          tile_dot<1, 2, 6>();
          tile_store<1>(to + 16, ld * 4);
        }
      }
      if (!more) return;
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
