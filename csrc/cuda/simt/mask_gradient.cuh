// The gradient of a float mask: ds summed over whatever the mask is shared by, rounded once. What a block
// owns, and what falls on it, is in mask/mask_pieces.h.
#pragma once

#include "../mask/mask_pieces.h"
#include "gradient_tile.cuh"

namespace selfattn::cuda::simt {

template <DType kDType>
__device__ __forceinline__ GradientPlan<kDType, Side::kMask> plan_of_mask(const AttentionParams& p,
                                                                          const BackwardArguments& a,
                                                                          const MaskPieces& pieces,
                                                                          int64_t block) {
  using Plan = GradientPlan<kDType, Side::kMask>;
  const MaskPieces::Tile at = pieces.piece(block / pieces.splits);
  Plan plan(p, a, pieces.kept[0] ? Span::only(at.batch) : Span{0, p.batch},
            pieces.kept[1] ? Span::only(at.head) : Span{0, p.heads},
            pieces.kept[2] ? Span::only(at.row_tile * Plan::kQueries) : Span{0, p.queries},
            pieces.kept[3] ? Span::only(at.column_tile * Plan::kKeys) : Span{0, p.keys});
  plan.skip(p, a, block % pieces.splits * pieces.split_items);
  if (plan.left > pieces.split_items) plan.left = pieces.split_items;
  while (!plan.done() && !plan.in_window(p)) plan.step(p, a);
  return plan;
}

// Element (row, column) of a piece that is shared by queries, keys or both, from the sums of the block's
// elements.
template <class T>
__device__ __forceinline__ T sum_of_panel(const T* panel, int first_row, int rows, int first_column,
                                          int columns) {
  T sum = T(0);
  for (int column = first_column; column < first_column + columns; ++column) {
    T part = T(0);
    for (int row = first_row; row < first_row + rows; ++row) {
      part += panel[panel_index<T, kRows<T>>(column, row)];
    }
    sum += part;
  }
  return sum;
}

// One element of a piece in the tensor, if it is there.
template <DType kDType, class T>
__device__ __forceinline__ void store_mask_gradient(const AttentionParams& p, const View& grad_mask,
                                                    const MaskPieces::Tile& at, int row, int column, T sum) {
  using Plan = GradientPlan<kDType, Side::kMask>;
  const int64_t query = at.row_tile * Plan::kQueries + row, key = at.column_tile * Plan::kKeys + column;
  if (query >= p.queries || key >= p.keys) return;
  const int64_t index = grad_mask.offset(at.batch, at.head, query) + key * grad_mask.stride[3];
  store_element<T>(grad_mask.data, grad_mask.dtype, index, sum);
}

// Blocks of a multiprocessor: its registers are enough for three, those of float64 would spill.
template <DType kDType>
constexpr int kMaskBlocks = kDType == DType::kFloat64 ? 2 : 3;

template <DType kDType>
__global__ void __launch_bounds__(kThreads, kMaskBlocks<kDType>)
    mask_gradient_kernel(const AttentionParams p, const BackwardArguments a,
                         const rows::RowGradients<typename Element<kDType>::Accumulation> rows,
                         const MaskPieces pieces, const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  SELFATTN_DYNAMIC_SHARED(memory);
  const GradientShared<kDType, Side::kMask> shared(memory);
  GradientPlan<kDType, Side::kMask>& plan = *shared.plan;
  const int64_t block = first_block + blockIdx.x;
  if (threadIdx.x == 0) plan = plan_of_mask<kDType>(p, a, pieces, block);
  __syncthreads();

  Fragment<T> sums;
  clear<T>(sums);
  for (; !plan.done(); move_on(plan, p, a)) {
    if (!gradient_tile<kDType, Side::kMask>(p, a, rows, shared, true, true)) continue;
    Fragment<T> grad;
    get_fragment<T>(shared.score_grads, grad);
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) sums[r][c] += grad[r][c];
    }
  }

  put_fragment<T>(shared.weights, sums);
  __syncthreads();
  const MaskPieces::Tile at = pieces.piece(block / pieces.splits);
  const int elements = pieces.rows() * pieces.columns();
  const bool one_number = !pieces.kept[2] && !pieces.kept[3];
  if (one_number) {
    // Rows first: over all its keys ds adds up to 0, so that the sum of rows is one of small numbers.
    const int row = static_cast<int>(threadIdx.x);
    if (row < kRows<T>) shared.columns[row] = sum_of_panel<T>(shared.weights, row, 1, 0, kColumns);
    __syncthreads();
  }
#pragma unroll 1
  for (int element = static_cast<int>(threadIdx.x); element < elements; element += kThreads) {
    const int row = element / pieces.columns(), column = element % pieces.columns();
    T sum = T(0);
    if (one_number) {
#pragma unroll 1
      for (int r = 0; r < kRows<T>; ++r) sum += shared.columns[r];
    } else {
      sum = sum_of_panel<T>(shared.weights, pieces.kept[2] ? row : 0, pieces.kept[2] ? 1 : kRows<T>,
                            pieces.kept[3] ? column : 0, pieces.kept[3] ? 1 : kColumns);
    }
    if (pieces.splits > 1) {
      static_cast<T*>(pieces.partial)[block * elements + element] = sum;
    } else {
      store_mask_gradient<kDType, T>(p, a.grad_mask, at, row, column, sum);
    }
  }
}

template <DType kDType>
MaskPieces pieces_of_mask(const AttentionParams& p, const BackwardArguments& a) {
  using Plan = GradientPlan<kDType, Side::kMask>;
  return mask_pieces(p, a, Plan::kQueries, Plan::kKeys);
}

template <DType kDType>
size_t mask_workspace(const AttentionParams& p, const BackwardArguments& a) {
  return mask_partial_bytes(pieces_of_mask<kDType>(p, a), kDType);
}

// `where.workspace` begins with the row gradients; then there is room for what splits leave.
template <DType kDType>
void mask_gradient(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  MaskPieces pieces = pieces_of_mask<kDType>(p, a);
  if (pieces.splits > 1) pieces.partial = static_cast<char*>(where.workspace) + rows::row_gradients_bytes(p);
  launch_blocks(&mask_gradient_kernel<kDType>, pieces.blocks(), kThreads,
                GradientShared<kDType, Side::kMask>::kBytes, where, p, a,
                rows::row_gradients_in<T>(where.workspace, p), pieces);
  join_mask_splits(p, a, pieces, where);
}

}  // namespace selfattn::cuda::simt
