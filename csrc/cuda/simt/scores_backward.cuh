// The gradients of queries and keys from those of the scores of attention_scores.
//
// A block owns rows of queries or keys and up to kOutputPanels panels of columns. The scores' gradients are
// the weights of the product.
#pragma once

#include "gradient_plan.cuh"
#include "store.cuh"

namespace selfattn::cuda::simt {

template <class T>
constexpr size_t kScoresBackwardBytes = static_cast<size_t>(kColumnPanel<T> + kWeightPanel<T>) * sizeof(T);

// Loads the scores' gradients for the result's rows from first_row on, and for steps `first` to
// first + kColumns - 1 of the sum.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void load_score_grads(const ScoresParams& p, int64_t batch, int64_t head,
                                                 int64_t first_row, int64_t first, T* panel) {
  const RowSource<kDType> grads(p.scores, batch, head);
#pragma unroll 1
  for (int step = 0; step < kColumns; step += kDepth<T>) {
    T* const to = panel + panel_size<kRows<T>>(step);
    if (kRowsAreKeys<kSide>) {
      load_rows<kDType, kRows<T>>(to, grads, first + step, p.queries, first_row, p.keys);
    } else {
      load_transposed<kDType, kRows<T>>(to, grads, first_row, p.queries, first + step, p.keys);
    }
  }
}

template <DType kDType, Side kSide>
__global__ void __launch_bounds__(kThreads, 2)
    scores_gradient_kernel(const ScoresParams p, const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  constexpr bool kOfKeys = kRowsAreKeys<kSide>;
  SELFATTN_DYNAMIC_SHARED(memory);
  T* const columns = reinterpret_cast<T*>(memory);
  T* const weights = columns + kColumnPanel<T>;

  const int64_t block = first_block + blockIdx.x, parts = divide_up(p.head_dim, kOutputColumns);
  const int64_t own_rows = kOfKeys ? p.keys : p.queries, steps = kOfKeys ? p.queries : p.keys;
  const HeadTile at(block / parts, kOfKeys ? p.kv_heads : p.heads, own_rows, kRows<T>);
  const int64_t first_column = block % parts * kOutputColumns;
  const bool has_rows = warp_has_rows<T>(smaller(own_rows - at.first_row, kRows<T>));
  const int64_t group = p.heads / p.kv_heads;

  Fragment<T> out[kOutputPanels];
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);
  for (int64_t member = 0; member < (kOfKeys ? group : 1); ++member) {
    const int64_t head = kOfKeys ? at.head * group + member : at.head;
    const RowSource<kDType> rows(kOfKeys ? p.query : p.key, at.batch, kOfKeys ? head : head / group);
    for (int64_t first = 0; first < steps; first += kColumns) {
      __syncthreads();  // all threads have finished with the weights
      load_score_grads<kDType, kSide>(p, at.batch, head, at.first_row, first, weights);
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) {
        const int64_t column = first_column + n * kColumns;
        if (column >= p.head_dim) continue;
        add_weighted<kDType, true>(weights, columns, RowRange{rows, first, steps}, column, p.head_dim,
                                   has_rows, out[n]);
      }
    }
  }

  const RowTarget<kDType> target(kOfKeys ? p.grad_key : p.grad_query, nullptr, at.batch, at.head);
  const T scale = static_cast<T>(p.scale);
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) {
    for_each_number<T>([&](int r, int c) { out[n][r][c] *= scale; });
    store_fragment<T>(target, at.first_row, own_rows, first_column + n * kColumns, p.head_dim, out[n]);
  }
}

template <DType kDType>
void scores_backward(const ScoresParams& p, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const int64_t parts = divide_up(p.head_dim, kOutputColumns);
  launch_blocks(&scores_gradient_kernel<kDType, Side::kQuery>,
                p.batch * p.heads * divide_up(p.queries, kRows<T>) * parts, kThreads, kScoresBackwardBytes<T>,
                where, p);
  launch_blocks(&scores_gradient_kernel<kDType, Side::kKey>,
                p.batch * p.kv_heads * divide_up(p.keys, kRows<T>) * parts, kThreads, kScoresBackwardBytes<T>,
                where, p);
}

}  // namespace selfattn::cuda::simt
