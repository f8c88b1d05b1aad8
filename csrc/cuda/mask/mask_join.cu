#include "../common/device.cuh"
#include "../common/divide_up.h"
#include "mask_pieces.h"

namespace selfattn::cuda {

namespace {

constexpr int kThreads = 128;

// A thread owns elements of pieces, and takes another when it is done with one.
__global__ void __launch_bounds__(kThreads, 4)
    join_mask_kernel(const MaskPieces pieces, const View gradient, int64_t queries, int64_t keys) {
  const int64_t of_piece = static_cast<int64_t>(pieces.rows()) * pieces.columns();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; n < pieces.pieces * of_piece;
       n += step) {
    const int64_t piece = n / of_piece, element = n % of_piece;
    const MaskPieces::Tile corner = pieces.piece(piece);
    const int64_t query = corner.row_tile * pieces.tile_rows + element / pieces.columns();
    const int64_t key = corner.column_tile * pieces.tile_columns + element % pieces.columns();
    if (query >= queries || key >= keys) continue;
    const double* partial = pieces.partial + piece * pieces.splits * of_piece + element;
    double sum = 0.0;
    for (int64_t split = 0; split < pieces.splits; ++split) sum += partial[split * of_piece];
    store_element(gradient.data, gradient.dtype,
                  gradient.offset(corner.batch, corner.head, query) + key * gradient.stride[3], sum);
  }
}

}  // namespace

void join_mask_splits(const AttentionParams& p, const BackwardArguments& a, const MaskPieces& pieces,
                      const Launch& where) {
  if (pieces.splits == 1 || pieces.blocks() == 0) return;
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t blocks = divide_up(pieces.pieces * pieces.rows() * pieces.columns(), kThreads);
  launch(&join_mask_kernel, dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)),
         dim3(kThreads), 0, where.stream, pieces, a.grad_mask, p.queries, p.keys);
}

}  // namespace selfattn::cuda
