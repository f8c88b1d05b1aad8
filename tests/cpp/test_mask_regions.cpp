// How the gradient of a float mask is divided among blocks, in plain C++.
#include "cuda/mask/mask_regions.cpp"

#include "check.h"

using namespace selfattn;
using namespace selfattn::cuda;

namespace {

constexpr int kTile = 64;

struct Mask {
  bool batch, head, query, key;
};

// Returns the regions for 3 batch elements and 4 heads.
MaskRegions regions_of(const Mask& mask, int64_t longest, bool has_sequences) {
  const int64_t start = 0;  // never read by the host
  AttentionParams p;
  p.batch = 3;
  p.heads = 4;
  p.queries = p.keys = longest;
  if (has_sequences) p.sequences.query_starts = p.sequences.key_starts = &start;
  BackwardArguments a;
  const bool kept[4] = {mask.batch, mask.head, mask.query, mask.key};
  for (int d = 0; d < 4; ++d) a.grad_mask.stride[d] = kept[d] ? 1 : 0;
  return mask_regions(p, a, kTile, kTile);
}

constexpr Mask kMasks[] = {{true, false, false, false}, {true, true, false, true},
                           {true, false, true, true},   {false, true, false, false},
                           {false, false, false, true}, {true, true, true, true}};

}  // namespace

TEST(every_item_of_a_region_is_in_one_split) {
  for (const Mask& mask : kMasks) {
    for (const int64_t longest : {1, 64, 65, 1000, 5000}) {
      for (const bool has_sequences : {false, true}) {
        const MaskRegions p = regions_of(mask, longest, has_sequences);
        CHECK(p.regions * p.items == p.count[0] * p.count[1] * p.count[2] * p.count[3]);
        CHECK(p.splits * p.split_items >= p.items && (p.splits - 1) * p.split_items < p.items);
      }
    }
  }
}

// Then a sequence has the same items in the same splits, whatever the longest sequence is: each split has the
// items of one head, or one split has all items.
TEST(the_mask_of_a_sequence_is_split_by_heads_or_not_at_all) {
  for (const int64_t longest : {1, 64, 65, 1000, 5000}) {
    const MaskRegions of_heads = regions_of({true, false, false, false}, longest, true);
    CHECK(of_heads.splits == 4);
    const MaskRegions::Tile corner = of_heads.region(1);
    for (int64_t n = 0; n < of_heads.items; ++n) {
      CHECK(of_heads.item(corner, n).head == n / of_heads.split_items);
    }
    CHECK(regions_of({true, true, false, false}, longest, true).splits == 1);
    CHECK(regions_of({true, false, true, true}, longest, true).splits == 1);
  }
}
