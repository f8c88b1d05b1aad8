#include <algorithm>

#include "../../core/integers.h"
#include "plan.h"

namespace selfattn::cuda::sm90 {

namespace {

constexpr int64_t kCounterBytes = 256;

constexpr int64_t kMostStride = int64_t{1} << 40;  // in bytes, of tensor maps

int64_t counter_offset(const AttentionParams& p) {
  return divide_up(static_cast<int64_t>(sm80::forward_workspace(p)), kCounterBytes) * kCounterBytes;
}

// Rows that are repeated (a stride of 0) have no map.
bool is_mappable(const View& view, int64_t rows, int64_t columns) {
  if (!sm80::readable_by_vectors(view, columns) || (rows > 1 && view.stride[2] == 0)) return false;
  return std::all_of(view.stride, view.stride + 3, [&](int64_t stride) {
    return stride >= 0 && stride * static_cast<int64_t>(size_of(view.dtype)) < kMostStride;
  });
}

MappedTensor mapped(const View& view, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                    int64_t box_rows) {
  TiledTensor tiled;
  tiled.data = view.data;
  tiled.box_rows = static_cast<int>(box_rows);
  tiled.bfloat16 = view.dtype == DType::kBFloat16;
  const int64_t sizes[4] = {columns, rows, heads, batch};
  bool moves[4] = {};
  for (int d = 0; d < 4; ++d) {
    const int64_t stride = view.stride[3 - d];
    moves[d] = sizes[d] > 1 && stride > 0;
    tiled.sizes[d] = moves[d] ? sizes[d] : 1;
    // One that is never taken must be legal all the same.
    tiled.strides[d] = d == 0 ? 1 : moves[d] ? stride : divide_up(columns, 8) * 8;
  }
  MappedTensor tensor;
  tensor.map = tensor_map(tiled);
  tensor.steps_of_head = moves[2] ? 1 : 0;
  tensor.steps_of_batch = moves[3] ? 1 : 0;
  return tensor;
}

// Rows of the boxes that make up a tile of keys in pages; 0 if there are none.
int64_t box_rows_of(const Pages& pages, int64_t tile_keys) {
  const bool fit = pages.size % tile_keys == 0 || tile_keys % pages.size == 0;
  return fit && pages.size % 8 == 0 ? std::min(pages.size, tile_keys) : 0;
}

}  // namespace

bool can_be_mapped(const AttentionParams& p) {
  return is_mappable(p.query, p.queries, p.head_dim) && is_mappable(p.key, p.keys, p.head_dim) &&
         is_mappable(p.value, p.keys, p.value_dim);
}

size_t forward_workspace(const AttentionParams& p) {
  return static_cast<size_t>(counter_offset(p) + kCounterBytes);
}

Plan plan_forward(const AttentionParams& p, const ForwardOutputs& outputs, const sm80::TileShape& tile,
                  void* workspace) {
  Plan plan;
  plan.plan = sm80::plan_forward(p, outputs, tile, nullptr);
  plan.next_item = reinterpret_cast<unsigned long long*>(static_cast<char*>(workspace) + counter_offset(p));
  if (plan.plan.blocks == 0) return plan;

  const Sequences& sequences = p.sequences;
  const bool paged = p.pages.table != nullptr, packed = sequences.key_starts != nullptr;
  plan.zeros_follow = !paged && !packed && sequences.key_lengths == nullptr;
  if (sequences.query_starts != nullptr) {
    plan.query = mapped(p.query, 1, p.heads, sequences.query_rows, p.head_dim, tile.rows);
  } else {
    plan.query = mapped(p.query, p.batch, p.heads, p.queries, p.head_dim, tile.rows);
  }
  const int64_t batch = paged ? p.pages.count : packed ? 1 : p.batch;
  const int64_t rows = paged ? p.pages.size : packed ? sequences.key_rows : p.keys;
  const int64_t box_rows = paged ? box_rows_of(p.pages, tile.keys) : tile.keys;
  plan.boxes_per_tile = box_rows > 0 ? static_cast<int>(tile.keys / box_rows) : 0;
  if (box_rows == 0) return plan;
  plan.key = mapped(p.key, batch, p.kv_heads, rows, p.head_dim, box_rows);
  plan.value = mapped(p.value, batch, p.kv_heads, rows, p.value_dim, box_rows);
  return plan;
}

}  // namespace selfattn::cuda::sm90
