#include "mask_regions.h"

#include <algorithm>

#include "../common/divide_up.h"

namespace selfattn::cuda {

namespace {

constexpr int64_t kAlignment = 256;  // of parts of a workspace

// Items of a split. Blocks enough to fill a large device, counted without the batch where the mask has one:
// an element must not depend on the batch it is computed in. For the same reason the splits' sums may not
// take more memory than a few elements per batch then, which rules tiles out.
//
// Nor may the mask of a sequence depend on the longest: what falls on it is split by heads, or not at all.
int64_t items_of_split(const MaskRegions& p, bool has_sequences) {
  constexpr int64_t kBlocks = 256;
  if (p.kept[0] && p.kept[2] && p.kept[3]) return p.items;
  if (p.kept[0] && has_sequences) return p.kept[1] || p.items == 0 ? p.items : p.items / p.count[1];
  const int64_t regions_of_batch = p.kept[0] && p.count[0] > 0 ? p.regions / p.count[0] : p.regions;
  return divide_up(p.items, std::max<int64_t>(1, kBlocks / std::max<int64_t>(1, regions_of_batch)));
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
    p.kept[d] = arguments.grad_mask.stride[d] != 0;
    (p.kept[d] ? p.regions : p.items) *= p.count[d];
  }
  p.split_items = items_of_split(p, params.sequences.any());
  p.splits = p.split_items > 0 ? divide_up(p.items, p.split_items) : 1;
  return p;
}

size_t mask_partial_bytes(const MaskRegions& p) {
  if (p.splits == 1) return 0;
  const int64_t bytes = p.regions * p.splits * p.rows() * p.columns() * static_cast<int64_t>(sizeof(double));
  return static_cast<size_t>(round_up(bytes, kAlignment));
}

}  // namespace selfattn::cuda
