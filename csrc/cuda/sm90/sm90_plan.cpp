#include "sm90_plan.h"

#include <algorithm>

#include "../../core/integers.h"

namespace selfattn::cuda::sm90 {

namespace {

constexpr int64_t kCounterBytes = 256;

int64_t counter_offset(const AttentionParams& p) {
  return divide_up(static_cast<int64_t>(mma::forward_workspace(p)), kCounterBytes) * kCounterBytes;
}

// The rows of the boxes that make up a tile of keys in pages; 0 if boxes do not fit the pages.
int64_t box_rows_of(const Pages& pages, int64_t tile_keys) {
  const bool fit = pages.size % tile_keys == 0 || tile_keys % pages.size == 0;
  return fit && pages.size % 8 == 0 ? std::min(pages.size, tile_keys) : 0;
}

// Whether items of work hold the queries of several heads that share keys: if the rows of one head would
// leave room in a tile. Packed calls always fold then, since only the longest sequence is known and others
// may be shorter.
bool folds(const AttentionParams& p, int64_t tile_rows) {
  constexpr int64_t kMostRows = int64_t{1} << 30;  // they are counted in 32 bits
  const int64_t group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
  if (p.queries >= tile_rows || group <= 1 || group > kMostRows / tile_rows) return false;
  return p.sequences.query_starts != nullptr || divide_up(group * p.queries, tile_rows) < group;
}

}  // namespace

bool can_be_mapped(const AttentionParams& p) {
  return is_mappable(p.query, p.queries, p.head_dim) && is_mappable(p.key, p.keys, p.head_dim) &&
         is_mappable(p.value, p.keys, p.value_dim);
}

size_t forward_workspace(const AttentionParams& p) {
  return static_cast<size_t>(counter_offset(p) + kCounterBytes);
}

Plan plan_forward(const AttentionParams& p, const ForwardOutputs& outputs, const mma::TileShape& tile,
                  void* workspace) {
  Plan plan{{}, mma::plan_forward(p, outputs, tile, nullptr)};
  plan.next_item = reinterpret_cast<unsigned long long*>(static_cast<char*>(workspace) + counter_offset(p));
  if (plan.blocks == 0) return plan;
  plan.folds = folds(p, tile.rows);
  if (plan.folds) {
    plan.row_tiles = divide_up(p.heads / p.kv_heads * p.queries, tile.rows);
    plan.blocks = p.batch * p.kv_heads * plan.row_tiles;
  }

  const bool paged = p.pages.table != nullptr;
  plan.zeros_follow = !paged && p.sequences.key_starts == nullptr && p.sequences.key_lengths == nullptr;
  plan.query = mapped_queries(p, p.query, p.head_dim, tile.rows);
  const int64_t box_rows = paged ? box_rows_of(p.pages, tile.keys) : tile.keys;
  plan.boxes_per_tile = box_rows > 0 ? static_cast<int>(tile.keys / box_rows) : 0;
  if (box_rows == 0) return plan;
  plan.key = mapped_keys(p, p.key, p.head_dim, box_rows);
  plan.value = mapped_keys(p, p.value, p.value_dim, box_rows);
  return plan;
}

}  // namespace selfattn::cuda::sm90
