// Divides the gradient of a mask into regions, and regions into splits.
#include "mask_regions.h"

#include <algorithm>

#include "../../core/integers.h"

namespace selfattn::cuda {

namespace {

constexpr int64_t kAlignment = 256;  // of parts of a workspace

// The number of items of a split.
//
// An element must not depend on the rest of the batch, nor on the longest sequence of a packed batch.
// Therefore, if every batch element has a mask of its own, the items of a region are split by heads or not at
// all. Regions of queries and keys are not split, because their sums would need the memory of the mask once
// more for each head. A sum over the batch depends on the batch anyway, and is split into enough blocks to
// fill a large device.
int64_t items_of_split(const MaskRegions& p) {
  constexpr int64_t kBlocks = 256;
  if (p.kept[0]) return p.kept[1] || p.is_tile() || p.items == 0 ? p.items : p.items / p.count[1];
  return divide_up(p.items, std::max<int64_t>(1, kBlocks / std::max<int64_t>(1, p.regions)));
}

}  // namespace

MaskRegions mask_regions(const AttentionParams& params, const BackwardArguments& arguments, int tile_rows,
                         int tile_columns) {
  MaskRegions p;
  p.tile_rows = tile_rows;
  p.tile_columns = tile_columns;
  p.count[0] = params.batch;
  p.count[1] = params.heads;
  p.count[2] = divide_up(params.queries, tile_rows);
  p.count[3] = divide_up(params.keys, tile_columns);
  p.regions = p.items = 1;
  for (int d = 0; d < 4; ++d) {
    // In a batch of one, the only element has a mask of its own, whatever the stride.
    p.kept[d] = arguments.grad_mask.stride[d] != 0 || (d == 0 && params.batch == 1);
    (p.kept[d] ? p.regions : p.items) *= p.count[d];
  }
  p.split_items = items_of_split(p);
  p.splits = p.split_items > 0 ? divide_up(p.items, p.split_items) : 1;
  return p;
}

size_t mask_partial_bytes(const MaskRegions& p) {
  if (p.splits == 1) return 0;
  const int64_t bytes = p.regions * p.splits * p.rows() * p.columns() * static_cast<int64_t>(sizeof(double));
  return static_cast<size_t>(round_up(bytes, kAlignment));
}

}  // namespace selfattn::cuda
