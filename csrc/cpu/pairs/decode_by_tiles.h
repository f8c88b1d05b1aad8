// Decoding in bfloat16 by tiles, where sixteen queries cost as much as one. These products take the place of
// few_query_scores.h and few_query_values.h.
//
//     S = K · Qᵀ        keys are the rows of a tile, where they lie; queries its lanes
//     O += P · V        queries are the rows, columns of values the lanes; two keys make a pair
//
// An instruction sums 32 elements of a key, or 32 keys of a column, by itself and then adds the sum. So a
// score does not depend on its neighbours, whatever their number; for sums over keys, every call begins at a
// multiple of 32 keys of its block.
#pragma once

#include "../products/few_query_products.h"
#include "decode_weights.h"

namespace selfattn::cpu::SELFATTN_ISA {

// A tile: its rows, the bfloat16 numbers of a row (which one instruction sums over), and its 32-bit words.
constexpr int64_t kRowsOfTile = 16, kDepthOfTile = 32, kTileWords = 256;
constexpr int64_t kTileKeys = kDepthOfTile;  // keys of one instruction where sums are over keys
constexpr int64_t kGroupColumns = 32;        // of values: a vector of bfloat16, or two tiles

// Tiles 0 and 1 are sums of values and tile 2 their weights, with as many rows as there are queries, sixteen
// at most; all other tiles are whole.
class FewQueryTiles : public PairEngine {
 public:
  void take_rows(int64_t rows) {
    const int count = static_cast<int>(smaller(rows, kRowsOfTile));
    if (count == rows_) return;
    rows_ = count;
    configure(3, count);
  }

 private:
  int rows_ = 16;
};

// Up to sixteen keys, the rows of a tile.
struct KeyTile {
  const char* rows[kRowsOfTile];
  int64_t count;
  int64_t step;  // from row to row; 0 if they are unevenly spaced or too few, and each has its address

  KeyTile(RowWalk& walk, int64_t n) : count(n), step(0) {
    if (n == kRowsOfTile && walk.even() >= n) {
      const RowRun run = walk.take(n);
      rows[0] = run.first;
      step = run.step;
    } else {
      for (int64_t i = 0; i < n; ++i) rows[i] = walk.next();
    }
  }
};

// Copies 32 elements of each key of a tile to the rows of `copy`, with zeros past the head dim and the last
// key.
inline void copy_keys(const KeyTile& tile, int64_t element, int64_t head_dim, uint16_t* copy) {
  const __mmask32 mask = elements_below(head_dim - element);
  for (int64_t i = 0; i < kRowsOfTile; ++i) {
    const int64_t row = tile.step != 0 ? 0 : i;
    const char* from = tile.rows[row] + (tile.step != 0 ? i * tile.step : 0) + element * 2;
    const __m512i x = i < tile.count ? _mm512_maskz_loadu_epi16(mask, from) : _mm512_setzero_si512();
    _mm512_store_si512(copy + i * kDepthOfTile, x);
  }
}

// Computes dots[key][query], the dot products of kTiles times sixteen keys with sixteen queries. Each product
// prefetches `share` bytes of `soon`.
template <int kTiles>
SELFATTN_INLINE void tile_dots(const uint16_t* query, const KeyTile* keys, int64_t head_dim, LinesAhead& soon,
                               int64_t share, float* dots) {
  alignas(64) uint16_t copy[2][kRowsOfTile * kDepthOfTile];
  const int64_t parts = padded_depth(head_dim) / kDepthOfTile;
  const bool whole = head_dim % kDepthOfTile == 0;
  tile_zero<3>();
  if constexpr (kTiles > 1) tile_zero<4>();
  const auto add = [&](auto c, int64_t part) {
    constexpr int kC = decltype(c)::value, kA = 5 + kC;
    const KeyTile& tile = keys[kC];
    soon.ask(share);
    if (whole && tile.step != 0) {
      tile_load<kA>(tile.rows[0] + part * 64, tile.step);
    } else {
      copy_keys(tile, part * kDepthOfTile, head_dim, copy[kC]);
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

// Loads four columns of a tile as vectors.
SELFATTN_INLINE void load_columns(const float* tile, __m512 (&columns)[4]) {
  __m512 x[4];  // rows i, i + 4, i + 8 and i + 12, four numbers of each
  SELFATTN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const auto row = [&](int of_four) { return _mm_load_ps(tile + (i + 4 * of_four) * 16); };
    x[i] = _mm512_insertf32x4(_mm512_castps128_ps512(row(0)), row(1), 1);
    x[i] = _mm512_insertf32x4(_mm512_insertf32x4(x[i], row(2), 2), row(3), 3);
  }
  const __m512 low = _mm512_unpacklo_ps(x[0], x[1]), high = _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 next_low = _mm512_unpacklo_ps(x[2], x[3]), next_high = _mm512_unpackhi_ps(x[2], x[3]);
  columns[0] = _mm512_shuffle_ps(low, next_low, 0x44);
  columns[1] = _mm512_shuffle_ps(low, next_low, 0xee);
  columns[2] = _mm512_shuffle_ps(high, next_high, 0x44);
  columns[3] = _mm512_shuffle_ps(high, next_high, 0xee);
}

// Stores s[query][key] = scale * dots[key][query] for up to sixteen keys and queries.
SELFATTN_INLINE void store_scores(const float* dots, int64_t queries, int64_t keys, __m512 scale, float* s,
                                  int64_t ld) {
  const __mmask16 mask = lanes_below(keys);
  for (int64_t first = 0; first < queries; first += 4) {
    __m512 columns[4];
    load_columns(dots + first, columns);
    SELFATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (first + i < queries) {
        _mm512_mask_storeu_ps(s + (first + i) * ld, mask, _mm512_mul_ps(columns[i], scale));
      }
    }
  }
}

// Values as tiles of pairs of neighbouring keys. Of 32 columns, the first tile holds the first four of every
// eight and the second tile the other four, since one instruction interleaves within 128 bits.
// FewQueryProducts::load_sums restores the order.
class ValueTiles {
 public:
  static constexpr int64_t kMostColumns = 128;

  explicit ValueTiles(int64_t columns) : groups_(divide_up(columns, kGroupColumns)), columns_(columns) {}
  int64_t columns() const { return columns_; }
  int64_t tiles() const { return groups_ * 2; }
  const uint32_t* tile(int64_t step, int64_t index) const {
    return words_ + (step * tiles() + index) * kTileWords;
  }

  // Loads 32 keys, or those that are left and zeros, from column `at` on. `visible` is as in FewQueryValues.
  // For every 32 columns of a pair of keys, `share` bytes of `soon` are prefetched.
  void load(int64_t step, int64_t at, FewQueryRows& values, const float* visible, LinesAhead& soon,
            int64_t share) {
    int64_t pair = 0;
    for (int64_t key = 0; key < kTileKeys && values.count > 0;) {
      const RowRun some = values.take_rows(kTileKeys - key);
      const int64_t count = some.rows, pairs = count / 2;
      int64_t group = 0;
      if (visible == nullptr) {
        const auto whole_groups = [&](auto at_once) {
          constexpr int kGroups = decltype(at_once)::value;
          for (; (group + kGroups) * kGroupColumns <= columns_; group += kGroups) {
            const char* first = some.first + at * 2 + group * 64;
            load_groups<kGroups>(row(step, group * 2, pair), {first, pairs, some.step}, soon, share);
          }
        };
        whole_groups(std::integral_constant<int, 4>{});
        whole_groups(std::integral_constant<int, 2>{});
        whole_groups(std::integral_constant<int, 1>{});
      }
      for (int64_t j = group < groups_ ? 0 : pairs; j < (count + 1) / 2; ++j) {
        const char* above = some.first + 2 * j * some.step + at * 2;
        const int64_t index = key + 2 * j;
        const bool two = j < pairs;
        load_pair(row(step, 0, pair + j), j < pairs ? group : 0, above,
                  visible == nullptr || visible[index] != 0.0f, above + (two ? some.step : 0),
                  two && (visible == nullptr || visible[index + 1] != 0.0f));
      }
      pair += (count + 1) / 2;
      key += count;
    }
    for (; pair < 16; ++pair) {
      for (int64_t i = 0; i < tiles(); ++i) _mm512_store_si512(row(step, i, pair), _mm512_setzero_si512());
    }
  }

 private:
  int64_t groups_, columns_;
  alignas(64) uint32_t words_[2 * kMostColumns / 16 * kTileWords];  // two steps, in the level-1 cache

  uint32_t* row(int64_t step, int64_t index, int64_t pair) {
    return words_ + (step * tiles() + index) * kTileWords + pair * 16;
  }
  static SELFATTN_INLINE void store_pairs(uint32_t* to, __m512i above, __m512i below) {
    _mm512_store_si512(to, _mm512_unpacklo_epi16(above, below));
    _mm512_store_si512(to + kTileWords, _mm512_unpackhi_epi16(above, below));
  }

  // Loads kGroups times 32 columns of each pair of rows.
  template <int kGroups>
  static void load_groups(uint32_t* to, const RowRun& pairs, LinesAhead& soon, int64_t share) {
    const char* above = pairs.first;
    for (int64_t i = 0; i < pairs.rows; ++i, to += 16) {
      const char* below = above + pairs.step;
      soon.ask(share * kGroups);
      SELFATTN_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        store_pairs(to + g * 2 * kTileWords, _mm512_loadu_si512(above + g * 64),
                    _mm512_loadu_si512(below + g * 64));
      }
      above = below + pairs.step;
    }
  }

  // Loads the groups of one pair from `group` on, with zeros in place of a row that takes no part.
  void load_pair(uint32_t* to, int64_t group, const char* above, bool takes_above, const char* below,
                 bool takes_below) const {
    for (; group < groups_; ++group) {
      const __mmask32 mask = elements_below(columns_ - group * kGroupColumns);
      store_pairs(to + group * 2 * kTileWords,
                  _mm512_maskz_loadu_epi16(takes_above ? mask : 0, above + group * 64),
                  _mm512_maskz_loadu_epi16(takes_below ? mask : 0, below + group * 64));
    }
  }
};

template <>
struct FewQueryProducts<TilePairs> {
  using Query = uint16_t;
  using Session = FewQueryTiles;
  static constexpr int64_t kStepKeys = kTileKeys;
  static constexpr int64_t kSpareRows = kRowsOfTile - 1;  // a tile may load as many more rows of weights

  static int64_t sums_rows(int64_t rows) { return rows < kRowsOfTile ? rows : padded_rows(rows); }

  // The layout of queries is [16 queries][32 elements][pair][query].
  static int64_t queries_size(const AttentionParams& p, int64_t rows) {
    return padded_rows(rows) * padded_depth(p.head_dim);
  }
  static void load_queries(const AttentionParams& p, const FewQueries& some, Query* to) {
    const int64_t depth = padded_depth(p.head_dim);
    memset(to, 0, static_cast<size_t>(queries_size(p, some.rows())) * sizeof(Query));
    int64_t lane = 0;
    for (int64_t head = some.head; head < some.head + some.heads; ++head) {
      for (int64_t i = some.query; i < some.query + some.queries; ++i, ++lane) {
        const auto* from = static_cast<const uint16_t*>(p.query.data) + p.query.offset(some.batch, head, i);
        Query* tiles = to + lane / kRowsOfTile * kRowsOfTile * depth + lane % kRowsOfTile * 2;
        for (int64_t e = 0; e < p.head_dim; ++e) tiles[e / 2 * 32 + e % 2] = from[e];
      }
    }
  }

  static void scores(const AttentionParams& p, const Query* query, int64_t rows, const FewQueryRows& keys,
                     float* s, int64_t ld) {
    const int64_t depth = padded_depth(p.head_dim);
    // Sixteen keys are prefetched in shares: one with each product and one while results are stored, for each
    // tile of queries.
    const int64_t share =
        kRowsOfTile * p.head_dim * 2 / ((depth / kDepthOfTile + 1) * divide_up(rows, kRowsOfTile));
    RowWalk walk = keys.rows;
    LinesAhead soon(keys.soon, p.head_dim * 2);
    for (int64_t key = 0; key < keys.count;) {
      const int64_t left = keys.count - key, tiles = left > kRowsOfTile ? 2 : 1;
      const int64_t taken = smaller(left, tiles * kRowsOfTile);
      const auto tile = [&](int64_t i) {
        const int64_t n = taken - i * kRowsOfTile;
        return KeyTile(walk, smaller(n, kRowsOfTile));
      };
      if (tiles == 2) {
        const KeyTile of_keys[2] = {tile(0), tile(1)};
        add_scores<2>(p, {query, rows}, of_keys, soon, share, s + key, ld);
      } else {
        const KeyTile of_keys[1] = {tile(0)};
        add_scores<1>(p, {query, rows}, of_keys, soon, share, s + key, ld);
      }
      key += taken;
    }
  }

  static float round_weights(int64_t keys, float* weights) { return round_to_pairs(keys, weights); }

  using Values = FewQueryValues<float, uint32_t>;
  static Values weigh(const float* weights, const float* visible, int64_t ld, int64_t value_dim, float* sums,
                      int64_t ld_sums) {
    return {reinterpret_cast<const uint32_t*>(weights), visible, ld, value_dim, sums, ld_sums};
  }
  static void values(const Values& a, int64_t rows, const FewQueryRows& values) {
    for (int64_t at = 0; at < a.value_dim; at += ValueTiles::kMostColumns) {
      const int64_t left = a.value_dim - at;
      ValueTiles tiles(smaller(left, ValueTiles::kMostColumns));
      if (a.visible == nullptr) {
        add_values(a, 0, rows, values, at, tiles, nullptr, a.sums + at, a.ld_sums);
        continue;
      }
      // Which keys are left out differs from row to row, so rows go one by one.
      alignas(64) float sums[kRowsOfTile * ValueTiles::kMostColumns];
      const size_t bytes = static_cast<size_t>(tiles.tiles()) * 16 * sizeof(float);
      memset(sums, 0, sizeof(sums));
      for (int64_t r = 0; r < rows; ++r) {
        memcpy(sums, a.sums + r * a.ld_sums + at, bytes);
        add_values(a, r, 1, values, at, tiles, a.visible + r * a.ld, sums, ValueTiles::kMostColumns);
        memcpy(a.sums + r * a.ld_sums + at, sums, bytes);
      }
    }
  }
  // Loads the sums of sixteen columns in their order.
  static SELFATTN_INLINE __m512 load_sums(const float* sums, int64_t column) {
    const float* group = sums + column / kGroupColumns * kGroupColumns;
    const int first = static_cast<int>(column % kGroupColumns) / 2;
    const __m512i index = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), _mm512_set1_epi32(first));
    return _mm512_permutex2var_ps(_mm512_loadu_ps(group), index, _mm512_loadu_ps(group + 16));
  }

 private:
  struct Queries {
    const Query* data;
    int64_t rows;
  };
  template <int kTiles>
  static void add_scores(const AttentionParams& p, const Queries& queries, const KeyTile* keys,
                         LinesAhead& soon, int64_t share, float* s, int64_t ld) {
    alignas(64) float dots[2 * kTileWords];
    const __m512 scale = _mm512_set1_ps(static_cast<float>(p.scale));
    for (int64_t row = 0; row < queries.rows; row += kRowsOfTile) {
      tile_dots<kTiles>(queries.data + row * padded_depth(p.head_dim), keys, p.head_dim, soon, share, dots);
      const int64_t n = smaller(queries.rows - row, kRowsOfTile);
      for (int i = 0; i < kTiles; ++i) {
        soon.ask(share);
        store_scores(dots + i * kTileWords, n, keys[i].count, scale, s + row * ld + i * 16, ld);
      }
    }
  }

  // sums[row] += weights[first + row] * values, for the columns of `tiles`. The next step is loaded before a
  // step is multiplied, so that its words reach the cache meanwhile: a tile cannot be loaded from stores that
  // are under way.
  static void add_values(const Values& a, int64_t first, int64_t rows, FewQueryRows values, int64_t at,
                         ValueTiles& tiles, const float* visible, float* sums, int64_t ld) {
    // One half is prefetched while values are interleaved, the other while they are multiplied, and all of it
    // with the first columns.
    LinesAhead soon(values.soon, a.value_dim * 2);
    const int64_t columns = at == 0 ? a.value_dim * kTileKeys / tiles.columns() : 0;
    const int64_t with_load = columns * 2, with_dots = columns * kTileKeys / divide_up(rows, kRowsOfTile);
    tiles.load(0, at, values, visible, soon, with_load);
    int64_t key = 0;
    for (int step = 0;; step = 1 - step, key += kTileKeys) {
      const bool more = values.count > 0;
      if (more) {
        tiles.load(1 - step, at, values, visible != nullptr ? visible + key + kTileKeys : nullptr, soon,
                   with_load);
      }
      for (int64_t row = 0; row < rows; row += kRowsOfTile) {
        const uint32_t* weights = a.weights + (first + row) * a.ld + key / 2;
        tile_load<2>(weights, a.ld * 4);
        for (int64_t i = 0; i < tiles.tiles(); i += 2) {
          float* to = sums + row * ld + i * 16;
          soon.ask(with_dots);
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
