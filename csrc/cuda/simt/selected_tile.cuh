// A tile of selected keys: queries that share a list of keys, and keys that need not be neighbours.
//
// Each row and each column of a tile says in shared memory which query or key it is. Loads, scores and
// dropout look it up there, so that the products are those of tiles of neighbours.
#pragma once

#include "../../core/visible_range.h"
#include "../common/dropout.cuh"
#include "../common/score_tile.cuh"
#include "product.cuh"
#include "store.cuh"

namespace selfattn::cuda::simt {

// A row or a column of a tile: a query of some head, or a key. A query's head is counted from the tile's
// first; a key has none.
struct TileLine {
  int64_t number;  // -1: there is no such query or key
  int head;
};

// The rows of a view that lines name, of a RowSource or of KeyRows. Lines without a number are rows of zeros.
template <DType kDType, class Rows = RowSource<kDType>>
struct ListedRows : Rows {
  using Storage = typename Element<kDType>::Storage;
  using T = typename Element<kDType>::Accumulation;

  const TileLine* lines;
  int64_t head_stride;

  template <class... Place>
  __device__ __forceinline__ ListedRows(const TileLine* of, const View& view, const Place&... place)
      : Rows(view, place...), lines(of), head_stride(view.stride[1]) {
    const uint64_t head_bytes = static_cast<uint64_t>(head_stride) * sizeof(Storage);
    this->aligned = this->aligned && head_bytes % sizeof(StorageVector<kDType>) == 0;
  }

  __device__ __forceinline__ const Storage* find(int64_t row, int64_t column) const {
    const TileLine line = lines[row];
    if (line.number < 0) return nullptr;
    return Rows::find(line.number, line.head * head_stride + column);
  }
  __device__ __forceinline__ const Storage* find_next(const Storage*, int64_t row, int more,
                                                      int64_t column) const {
    return find(row + more, column);
  }
  __device__ __forceinline__ Vector<T> vector(const Storage* at, int count) const {
    return Rows::vector(at, at != nullptr ? count : 0);
  }
};

// The rows of a result that lines name. Lines without a number are not stored.
template <DType kDType>
struct ListedTarget : RowTarget<kDType> {
  using typename RowTarget<kDType>::T;

  const TileLine* lines;
  int64_t head_stride;

  __device__ __forceinline__ ListedTarget(const TileLine* of, const View& view, void* residual, int64_t batch,
                                          int64_t head, int64_t first_row)
      : RowTarget<kDType>(view, residual, batch, head, first_row), lines(of), head_stride(view.stride[1]) {
    const uint64_t head_bytes =
        static_cast<uint64_t>(head_stride) * sizeof(typename Element<kDType>::Storage);
    this->aligned = this->aligned && head_bytes % sizeof(StorageVector<kDType>) == 0;
  }

  __device__ __forceinline__ void put(int64_t row, int64_t column, int64_t columns,
                                      const Vector<T>& v) const {
    const TileLine line = lines[row];
    if (line.number < 0) return;
    this->put_at(line.head * head_stride + line.number * this->row_stride + column, columns - column, v);
  }
};

// A block's shared memory.
template <class T>
struct SelectedShared {
  static constexpr size_t kLineBytes = (kRows<T> + kColumns) * sizeof(TileLine);
  static constexpr size_t kBytes =
      kLineBytes + static_cast<size_t>(kRows<T> + kColumnPanel<T> + 2 * kWeightPanel<T>) * sizeof(T);
  static_assert(kRowPanel<T> <= kWeightPanel<T>, "the rows of products lie where ds follows");

  TileLine* rows;     // kRows
  TileLine* columns;  // kColumns
  T* row_sums;        // kRows: sums of ds times distance
  T* column_panel;    // kColumnPanel
  T* weights;         // kWeightPanel
  T* score_grads;     // kWeightPanel: the gradient of q·k
  T* product_rows;    // kRowPanel, in the same place: the products are done when ds is stored

  __device__ __forceinline__ explicit SelectedShared(unsigned char* memory)
      : rows(reinterpret_cast<TileLine*>(memory)),
        columns(rows + kRows<T>),
        row_sums(reinterpret_cast<T*>(memory + kLineBytes)),
        column_panel(row_sums + kRows<T>),
        weights(column_panel + kColumnPanel<T>),
        score_grads(weights + kWeightPanel<T>),
        product_rows(score_grads) {}
};

// Fills the lines of a tile with line_of(0), line_of(1) ...; a barrier must follow.
template <int kLines, class LineOf>
__device__ __forceinline__ void fill_lines(TileLine* lines, const LineOf& line_of) {
  static_assert(kLines <= kThreads, "a thread fills a line");
  const int own = static_cast<int>(threadIdx.x);
  if (own < kLines) lines[own] = line_of(own);
}

// fragment(r, c) = row r of `left` · row c of `right`. All threads have filled the lines, and must call it.
template <DType kDType, class Left, class Right, class T>
__device__ __forceinline__ void multiply_listed(const SelectedShared<T>& shared, const Left& left, int rows,
                                                const Right& right, int columns, int64_t dims, bool has_rows,
                                                Fragment<T>& fragment) {
  clear<T>(fragment);
  for (int64_t dim = 0; dim < dims; dim += kDepth<T>) {
    __syncthreads();  // all threads have finished with the panels
    load_transposed<kDType, kRows<T>>(shared.product_rows, left, 0, rows, dim, dims);
    load_transposed<kDType, kColumns>(shared.column_panel, right, 0, columns, dim, dims);
    __syncthreads();
    if (has_rows) {
      multiply<T>(shared.product_rows, shared.column_panel, smaller(dims - dim, kDepth<T>), fragment);
    }
  }
}

// The scores of a tile, with the interface of ScoreTile as far as finish_scores needs it. A pair of lines has
// a ScoreTile of its own if a score is more than scale · q·k.
template <class T>
class SelectedScores {
 public:
  // `head` is the first head.
  __device__ __forceinline__ SelectedScores(const AttentionParams& params, const Sequence& sequence,
                                            int64_t head, const TileLine* rows, const TileLine* columns)
      : p(params), sequence_(sequence), head_(head), rows_(rows), columns_(columns) {}

  __device__ __forceinline__ bool is_bare() const {
    return p.mask.data == nullptr && p.softcap == 0.0 && p.alibi_slopes.data == nullptr;
  }
  // Nobody has looked at all pairs.
  __device__ __forceinline__ bool window_covers(int, int) const { return false; }
  __device__ __forceinline__ T scaled(T dot) const { return rounded_product(static_cast<T>(p.scale), dot); }

  // Whether both exist, and the window shows the key to the query.
  __device__ __forceinline__ bool window_shows(const TileLine& query, const TileLine& key) const {
    const int64_t behind = query.number + sequence_.query_offset - key.number;
    return query.number >= 0 && key.number >= 0 && (p.window_left < 0 || behind <= p.window_left) &&
           (p.window_right < 0 || -behind <= p.window_right);
  }
  __device__ __forceinline__ ScoreTile<T> of(const TileLine& query, const TileLine& key) const {
    ScoreTile<T> tile(p, sequence_, head_ + query.head, query.number);
    tile.move_to(key.number);
    return tile;
  }
  // The final score of a pair in a tile whose rows are queries; -inf if any rule hides it.
  __device__ __forceinline__ T score(int row, int column, T dot) const {
    const TileLine query = rows_[row], key = columns_[column];
    if (!window_shows(query, key)) return -infinity<T>();
    return is_bare() ? scaled(dot) : of(query, key).score_in_window(0, 0, dot);
  }

 private:
  const AttentionParams& p;
  const Sequence& sequence_;
  const int64_t head_;
  const TileLine *rows_, *columns_;
};

// The factors of dropout for one query and keys in any order. Neighbours share a call of Philox.
template <class T>
class DropoutOfQuery {
 public:
  __device__ __forceinline__ DropoutOfQuery(const DropoutPattern<T>& pattern, const TileLine& query)
      : pattern_(pattern), query_(query) {}

  __device__ __forceinline__ T factor(int64_t key) {
    if (key >> 2 != group_) {
      group_ = key >> 2;
      words_ = pattern_.words(query_.number, key, query_.head);
    }
    return pattern_.factor(words_, key);
  }

 private:
  const DropoutPattern<T>& pattern_;
  const TileLine query_;
  int64_t group_ = -1;
  Philox4 words_ = {};
};

// Returns the first place of `numbers`, whose first `count` ascend as far as they are not negative, at which
// a number is not below `least` or is negative.
__device__ __forceinline__ int64_t first_from(const int32_t* numbers, int64_t count, int64_t least) {
  int64_t first = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    const int32_t number = numbers[first + half];
    if (number >= 0 && number < least) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return first;
}

// The query heads that share lists and a kv head, which a tile may hold.
SELFATTN_HOST_DEVICE inline int64_t heads_together(const AttentionParams& p) {
  return selfattn::smaller(p.heads / p.kv_heads, p.selection.heads_per_list);
}

// The tiles of queries: neighbouring queries that share a list, of several heads if there are few.
template <class T>
struct QueryTiles {
  int64_t at_once, heads_at_once;               // queries and heads of a tile
  int64_t tiles_of_row, tiles_of_heads, units;  // units of heads that share lists and a kv head

  SELFATTN_HOST_DEVICE explicit QueryTiles(const AttentionParams& p)
      : at_once(selfattn::smaller(selfattn::smaller(p.selection.query_size, p.queries), int64_t{kRows<T>})),
        heads_at_once(selfattn::smaller(heads_together(p), kRows<T> / at_once)),
        tiles_of_row(divide_up(selfattn::smaller(p.selection.query_size, p.queries), at_once)),
        tiles_of_heads(divide_up(heads_together(p), heads_at_once)),
        units(p.heads / heads_together(p)) {}

  // The lists of a head of the longest sequence. Tiles of shorter ones may have no rows.
  static SELFATTN_HOST_DEVICE int64_t lists(const AttentionParams& p) {
    return divide_up(p.queries, p.selection.query_size);
  }
  SELFATTN_HOST_DEVICE int64_t count(const AttentionParams& p) const {
    return p.batch * units * lists(p) * tiles_of_heads * tiles_of_row;
  }
};

// The keys of a list. Columns of tiles are begin .. end - 1 of them.
struct ListedKeys {
  const int32_t* numbers;  // of blocks of keys
  int64_t key_size, keys;  // of a block, and of the sequence
  int64_t begin, end;

  __device__ __forceinline__ TileLine line(int64_t index) const {
    if (index >= end) return {-1, 0};
    const int64_t key = numbers[index / key_size] * key_size + index % key_size;
    return {key < keys ? key : -1, 0};
  }
};

// A tile of queries.
template <class T>
struct QueryTile {
  Sequence sequence;
  int64_t head, list_row, first_query;
  int queries, rows;  // of a head, and of all heads; there may be none

  __device__ __forceinline__ QueryTile(const AttentionParams& p, int64_t index) {
    const Selection& s = p.selection;
    const QueryTiles<T> tiles(p);
    const int64_t of_row = index % tiles.tiles_of_row, lists = QueryTiles<T>::lists(p);
    index /= tiles.tiles_of_row;
    list_row = index % lists;
    index /= lists;
    const int64_t of_heads = index % tiles.tiles_of_heads;
    index /= tiles.tiles_of_heads;
    const int64_t together = heads_together(p), first_head = of_heads * tiles.heads_at_once;
    sequence = sequence_of(p, index / tiles.units);
    head = index % tiles.units * together + first_head;
    first_query = list_row * s.query_size + of_row * tiles.at_once;
    const int64_t end = selfattn::smaller(sequence.queries, (list_row + 1) * s.query_size);
    queries = static_cast<int>(limited(end - first_query, 0, tiles.at_once));
    rows = queries * static_cast<int>(selfattn::smaller(together - first_head, tiles.heads_at_once));
  }

  __device__ __forceinline__ TileLine line(int index) const {
    if (index >= rows) return {-1, 0};
    return {first_query + index % queries, index / queries};
  }

  // Leaves out tiles of which the windows show nothing. Tiles begin at multiples of their width in the list,
  // so that a row's bits depend on the row alone.
  __device__ __forceinline__ ListedKeys listed_keys(const AttentionParams& p) const {
    const Selection& s = p.selection;
    if (rows == 0) return {nullptr, s.key_size, 0, 0, 0};  // only a longer sequence has this list
    const Positions positions = positions_of(p, sequence);
    const KeyRange visible = visible_keys(positions, first_query, first_query + queries - 1);
    // Packed queries have a row of lists each, wherever their sequence begins.
    const int32_t* const list = s.row(sequence.query_batch, head, sequence.first_query + list_row);
    const int64_t first = first_from(list, s.longest, visible.begin / s.key_size);
    const int64_t seen = first_from(list + first, s.longest - first, divide_up(visible.end, s.key_size));
    return {list, s.key_size, sequence.keys, first * s.key_size / kColumns * kColumns,
            (first + seen) * s.key_size};
  }
};

}  // namespace selfattn::cuda::simt
