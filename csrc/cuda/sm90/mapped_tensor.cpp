#include "mapped_tensor.h"

#include <algorithm>

#include "../../core/integers.h"
#include "../mma/forward_plan.h"

namespace selfattn::cuda::sm90 {

namespace {

constexpr int64_t kMostStride = int64_t{1} << 40;  // bytes that a tensor map allows

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
    // A stride that is never taken must be legal, too.
    tiled.strides[d] = d == 0 ? 1 : moves[d] ? stride : divide_up(columns, 8) * 8;
  }
  MappedTensor tensor;
  tensor.map = tensor_map(tiled);
  tensor.steps_of_head = moves[2] ? 1 : 0;
  tensor.steps_of_batch = moves[3] ? 1 : 0;
  return tensor;
}

}  // namespace

bool is_mappable(const View& view, int64_t rows, int64_t columns) {
  if (!mma::readable_by_vectors(view, columns) || (rows > 1 && view.stride[2] == 0)) return false;
  return std::all_of(view.stride, view.stride + 3, [&](int64_t stride) {
    return stride >= 0 && stride * static_cast<int64_t>(size_of(view.dtype)) < kMostStride;
  });
}

MappedTensor mapped_queries(const AttentionParams& p, const View& view, int64_t columns, int64_t box_rows) {
  const bool packed = p.sequences.query_starts != nullptr;
  return mapped(view, packed ? 1 : p.batch, p.heads, packed ? p.sequences.query_rows : p.queries, columns,
                box_rows);
}

MappedTensor mapped_keys(const AttentionParams& p, const View& view, int64_t columns, int64_t box_rows) {
  if (p.pages.table != nullptr) {
    return mapped(view, p.pages.count, p.kv_heads, p.pages.size, columns, box_rows);
  }
  const bool packed = p.sequences.key_starts != nullptr;
  return mapped(view, packed ? 1 : p.batch, p.kv_heads, packed ? p.sequences.key_rows : p.keys, columns,
                box_rows);
}

}  // namespace selfattn::cuda::sm90
