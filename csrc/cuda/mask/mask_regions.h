// The gradient of a float mask, dS summed over the dimensions along which the mask was broadcast, as work for
// blocks: which of them owns what, and what falls on it. Every kernel divides its work like this, whatever
// the shape of its tiles.
//
// A region is a tile of the gradient: rows are queries and columns keys, or a single row or column where the
// mask has none of them. Its items are the tiles of scores that fall on it, of all batches, heads, queries
// and keys that the mask does not tell apart. A block adds up items in their order in its registers and owns
// a region, or a split of its items; splits leave their sums in the workspace, and join() adds these in
// order. There is neither a race nor a temporary of the scores' size, and the order of every sum depends on
// the shape alone. Where sequences are shorter than the longest, kernels leave out the tiles that they do not
// have.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/attention_params.h"
#include "../common/launch.h"

namespace selfattn::cuda {

struct MaskRegions {
  // Of a tile of scores.
  int tile_rows = 0;
  int tile_columns = 0;
  // Whether batch, head, query and key have a dimension in the mask.
  bool kept[4] = {false, false, false, false};
  // Batches, heads, tiles of queries and tiles of keys that there are.
  int64_t count[4] = {0, 0, 0, 0};

  int64_t regions = 0;
  int64_t items = 0;  // of a region
  int64_t splits = 1;
  int64_t split_items = 0;
  double* partial = nullptr;  // [regions][splits][rows()][columns()]; null for one split

  SELFATTN_HOST_DEVICE int rows() const { return kept[2] ? tile_rows : 1; }
  SELFATTN_HOST_DEVICE int columns() const { return kept[3] ? tile_columns : 1; }
  // Of queries and keys, rather than sums over either or both; see line_totals.cuh.
  SELFATTN_HOST_DEVICE bool is_tile() const { return kept[2] && kept[3]; }
  SELFATTN_HOST_DEVICE int64_t blocks() const { return items > 0 ? regions * splits : 0; }

  struct Tile {
    int64_t batch, head, row_tile, column_tile;
  };

  // Where a region lies; 0 along dimensions that are summed over.
  SELFATTN_HOST_DEVICE Tile region(int64_t index) const { return unravel(index, true); }

  // Item n of a region that lies at `corner`.
  SELFATTN_HOST_DEVICE Tile item(const Tile& corner, int64_t n) const {
    const Tile moved = unravel(n, false);
    return {corner.batch + moved.batch, corner.head + moved.head, corner.row_tile + moved.row_tile,
            corner.column_tile + moved.column_tile};
  }

 private:
  // The last dimension counts fastest.
  SELFATTN_HOST_DEVICE Tile unravel(int64_t index, bool along_kept) const {
    Tile at{0, 0, 0, 0};
    take(index, along_kept, 3, at.column_tile);
    take(index, along_kept, 2, at.row_tile);
    take(index, along_kept, 1, at.head);
    take(index, along_kept, 0, at.batch);
    return at;
  }
  SELFATTN_HOST_DEVICE void take(int64_t& index, bool along_kept, int d, int64_t& at) const {
    if (kept[d] != along_kept) return;
    at = index % count[d];
    index /= count[d];
  }
};

// For tiles of scores of this shape. `partial` is left null.
MaskRegions mask_regions(const AttentionParams& params, const BackwardArguments& arguments, int tile_rows,
                         int tile_columns);

// Bytes of `partial`, a multiple of 256; 0 where nothing is split.
size_t mask_partial_bytes(const MaskRegions& regions);

// Adds up the splits and writes the gradient. Nothing is to be done where nothing is split.
void join_mask_splits(const AttentionParams& params, const BackwardArguments& arguments,
                      const MaskRegions& regions, const Launch& where);

}  // namespace selfattn::cuda
