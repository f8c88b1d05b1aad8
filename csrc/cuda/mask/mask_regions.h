// How blocks share the work for the gradient of a float mask. Plain C++.
//
// The gradient is dS summed over the dimensions along which the mask was broadcast. Every kernel divides its
// work as follows, whatever the shape of its tiles. A region is a tile of the gradient: rows are queries and
// columns are keys, or a single row or column if the mask is broadcast along them. The items of a region are
// the tiles of scores that are added to it, of all batches, heads, queries and keys for which the mask has
// the same elements. A block owns a region, or a split of its items, and adds up the items in their order in
// its registers. Splits leave their sums in the workspace, and join_mask_splits() adds these in order. There
// is neither a race nor a temporary of the scores' size, and the order of every sum depends only on the
// shape. Kernels leave out tiles that lie behind the end of a sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/attention_params.h"
#include "../common/launch.h"

namespace selfattn::cuda {

struct MaskRegions {
  // The shape of a tile of scores.
  int tile_rows = 0;
  int tile_columns = 0;
  // Whether batch, head, query and key have a dimension in the mask.
  bool kept[4] = {false, false, false, false};
  // The numbers of batches, heads, tiles of queries and tiles of keys.
  int64_t count[4] = {0, 0, 0, 0};

  int64_t regions = 0;
  int64_t items = 0;  // of a region
  int64_t splits = 1;
  int64_t split_items = 0;
  double* partial = nullptr;  // [regions][splits][rows()][columns()]; null for one split

  SELFATTN_HOST_DEVICE int rows() const { return kept[2] ? tile_rows : 1; }
  SELFATTN_HOST_DEVICE int columns() const { return kept[3] ? tile_columns : 1; }
  // Whether the mask has both queries and keys, so that no element is a sum over either; see line_totals.cuh.
  SELFATTN_HOST_DEVICE bool is_tile() const { return kept[2] && kept[3]; }
  SELFATTN_HOST_DEVICE int64_t blocks() const { return items > 0 ? regions * splits : 0; }

  struct Tile {
    int64_t batch, head, row_tile, column_tile;
  };

  // The place of a region; 0 along dimensions that are summed over.
  SELFATTN_HOST_DEVICE Tile region(int64_t index) const { return unravel(index, true); }

  // Item n of a region that lies at `corner`.
  SELFATTN_HOST_DEVICE Tile item(const Tile& corner, int64_t n) const {
    const Tile moved = unravel(n, false);
    return {corner.batch + moved.batch, corner.head + moved.head, corner.row_tile + moved.row_tile,
            corner.column_tile + moved.column_tile};
  }

 private:
  // The index of the last dimension changes fastest.
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

// The regions for tiles of scores of this shape. `partial` is left null.
MaskRegions mask_regions(const AttentionParams& params, const BackwardArguments& arguments, int tile_rows,
                         int tile_columns);

// Bytes of `partial`, a multiple of 256; 0 if nothing is split.
size_t mask_partial_bytes(const MaskRegions& regions);

// Adds up the splits and writes the gradient. Does nothing if nothing is split.
void join_mask_splits(const AttentionParams& params, const BackwardArguments& arguments,
                      const MaskRegions& regions, const Launch& where);

}  // namespace selfattn::cuda
