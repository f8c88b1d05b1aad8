// A tile of the backward: from the products q·k and dO·v to the weights W and to ds.
//
//   P = exp(score - shift) * inverse_sum,  W = P * keep,  ds = P * ((dO·v + grad_weights) * keep - delta)
//
// Gradients of statistics add to the last bracket: Note [Statistics of scores] in core/attention_params.h.
//
// W and ds are -0 for hidden pairs of query and key, and never -0 for others: see is_hidden.
#pragma once

#include "../rows/rows.h"
#include "gradient_plan.cuh"
#include "scores.cuh"

namespace selfattn::cuda::simt {

// The statistics of a query's row, which give P and ds of its pairs.
template <class T>
struct QueryNumbers {
  T shift, inverse_sum, delta;

  __device__ __forceinline__ QueryNumbers(const rows::RowGradients<T>& rows, int64_t row)
      : shift(rows.shift[row]), inverse_sum(rows.inverse_sum[row]), delta(rows.delta[row]) {}

  // Whether the row sees nothing, so that all its pairs are hidden.
  __device__ __forceinline__ bool is_dead() const { return inverse_sum == T(0); }

  // P of a visible pair. If the row's sum is NaN, it is NaN even for a score of -inf.
  __device__ __forceinline__ T weight(T score) const { return exponential(score - shift) * inverse_sum; }

  // ds of a visible pair. Adding 0 turns -0, which stands for hidden pairs, into +0.
  __device__ __forceinline__ T score_grad(T weight, T grad) const { return weight * (grad - delta) + T(0); }
};

// fragment(r, c) += row r of `left` · row c of `right`. The elements of each row are neighbours in memory.
template <DType kDType, Side kSide, class Left, class Right, class T>
__device__ __forceinline__ void add_product_of_rows(const GradientShared<kDType, kSide>& shared,
                                                    const RowRange<Left>& left, const RowRange<Right>& right,
                                                    int64_t dims, bool has_rows, Fragment<T>& fragment) {
  for (int64_t dim = 0; dim < dims; dim += kDepth<T>) {
    __syncthreads();  // all threads have finished with the panels
    load_transposed<kDType, kRows<T>>(shared.product_rows, left.source, left.first, left.end, dim, dims);
    load_transposed<kDType, kColumns>(shared.columns, right.source, right.first, right.end, dim, dims);
    __syncthreads();
    if (has_rows) multiply<T>(shared.product_rows, shared.columns, smaller(dims - dim, kDepth<T>), fragment);
  }
}

template <DType kDType, Side kSide, class Source, class T>
__device__ __forceinline__ void multiply_rows(const GradientShared<kDType, kSide>& shared,
                                              const RowRange<Source>& left, const RowRange<Source>& right,
                                              int64_t dims, bool has_rows, Fragment<T>& fragment) {
  clear<T>(fragment);
  add_product_of_rows(shared, left, right, dims, has_rows, fragment);
}

// Whether the mask and the window show anything of this thread's share of the tile. Neighbouring threads have
// neighbouring keys.
template <int kQueries, int kKeys, class T>
__device__ __forceinline__ bool share_is_seen(const ScoreTile<T>& tile) {
  constexpr int kAtOnce = 4, kStep = kThreads / kKeys;
  const int key = static_cast<int>(threadIdx.x) % kKeys, own = static_cast<int>(threadIdx.x) / kKeys;
  bool any = false;
#pragma unroll 1
  for (int first = own; first < kQueries && !any; first += kAtOnce * kStep) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int query = first + i * kStep;
      any = any || (tile.window_shows(query, key) && tile.mask_shows(query, key));
    }
  }
  return any;
}

// Whether any score of the plan's current tile is visible. All threads must call it.
template <DType kDType, Side kSide>
__device__ __forceinline__ bool tile_is_seen(const AttentionParams& p,
                                             const GradientPlan<kDType, kSide>& plan) {
  using Plan = GradientPlan<kDType, kSide>;
  using T = typename Plan::T;
  if (p.mask.data == nullptr && (!FunctionTile<T>::kAny || p.function.map.blocks == nullptr)) return true;
  ScoreTile<T> tile(p, plan.sequence, plan.head, plan.first_query);
  tile.move_to(plan.first_key);
  return __syncthreads_or(share_is_seen<Plan::kQueries, Plan::kKeys>(tile)) != 0;
}

// Turns both products of a full tile into W and ds if scores have no option but a scale.
template <Side kSide, class T>
__device__ __forceinline__ void weigh_bare(const ScoreTile<T>& tile, const rows::RowGradients<T>& rows,
                                           int64_t first_row, Fragment<T>& s, Fragment<T>& grad) {
#pragma unroll
  for (int q = 0; q < (kRowsAreKeys<kSide> ? kColumnsPerThread : kRowsPerThread<T>); ++q) {
    const QueryNumbers<T> query(
        rows, first_row + (kRowsAreKeys<kSide> ? fragment_column<T>(q) : fragment_row<T>(q)));
#pragma unroll
    for (int k = 0; k < (kRowsAreKeys<kSide> ? kRowsPerThread<T> : kColumnsPerThread); ++k) {
      T& score = kRowsAreKeys<kSide> ? s[k][q] : s[q][k];
      T& score_grad = kRowsAreKeys<kSide> ? grad[k][q] : grad[q][k];
      const T weight = query.weight(tile.scaled(score));
      score = query.is_dead() ? -T(0) : weight;
      score_grad = query.is_dead() ? -T(0) : query.score_grad(weight, score_grad);
    }
  }
}

// What gradients of statistics add to the gradient of a visible pair's weight. `row` is the place of the
// query's statistics, and `below` the score less the row's shift.
template <class T>
__device__ __forceinline__ T gradient_of_statistics(const AttentionParams& p, const BackwardArguments& a,
                                                    const Sequence& sequence, int64_t head, int64_t row,
                                                    int64_t key, T below) {
  T added = T(0);
  if (a.grad_mean != nullptr) added = static_cast<const T*>(a.grad_mean)[row] * below;
  if (a.grad_keys != nullptr) {
    added += static_cast<const T*>(a.grad_keys)[first_key_number(p, sequence, head) + key];
  }
  return added;
}

// Does the same with every option, in the panels, where both products lie. It loops over queries, because
// code that is unrolled over the registers of two fragments would be long and spill them. ds is multiplied by
// the softcap's slope if it will be multiplied by queries or keys. For captured tensors the scores that their
// function is given replace W.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void weigh_options(const AttentionParams& p, const BackwardArguments& a,
                                              const ScoreTile<T>& tile, const rows::RowGradients<T>& rows,
                                              const GradientShared<kDType, kSide>& shared) {
  using Storage = typename Element<kDType>::Storage;
  constexpr bool kByKeys = kRowsAreKeys<kSide>;
  constexpr int kOwnQueries = kByKeys ? kColumnsPerThread : kRowsPerThread<T>;
  constexpr int kOwnKeys = kByKeys ? kRowsPerThread<T> : kColumnsPerThread;
  // A group holds neighbouring keys of the same four.
  constexpr int kGroup = kByKeys ? 4 : kVector<T>;
  static_assert(kOwnKeys % kGroup == 0 && kGroup <= 4, "keys are weighed by groups");
  const GradientPlan<kDType, kSide>& plan = *shared.plan;
  T* const weights = shared.weights;
  T* const grads = shared.score_grads;
  const int64_t first_row = first_statistic_of(p, plan.sequence, plan.head) + plan.first_query;
  const DropoutPattern<T> dropout(p.dropout, plan.sequence.batch, plan.head);
  const bool sum_slopes = kSide == Side::kQuery && a.grad_slopes_rows != nullptr;

#pragma unroll 1
  for (int q = 0; q < kOwnQueries; ++q) {
    const int query = kByKeys ? fragment_column<T>(q) : fragment_row<T>(q);
    // A row that does not exist takes the numbers of another: the window shows nothing of it.
    const QueryNumbers<T> numbers(rows, first_row + (query < tile.rows() ? query : 0));
    T slope = T(0);
#pragma unroll 1
    for (int k = 0; k < kOwnKeys; k += kGroup) {
      const int first_key = kByKeys ? fragment_row<T>(k) : fragment_column<T>(k);
      Philox4 words = {};
      if (dropout.enabled()) words = dropout.words(plan.first_query + query, plan.first_key + first_key);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int key = first_key + i;
        const int at = kByKeys ? panel_index<T, kRows<T>>(query, key) : panel_index<T, kRows<T>>(key, query);
        const T dot = weights[at];
        T weight = -T(0), grad = -T(0);
        if (!numbers.is_dead() && tile.window_shows(query, key) && tile.mask_shows(query, key)) {
          const T keep = dropout.enabled() ? dropout.factor(words, plan.first_key + key) : T(1);
          T weight_grad = grads[at];
          if (a.grad_weights.data != nullptr) {
            const View& g = a.grad_weights;
            const int64_t element = g.offset(plan.sequence.batch, plan.head, plan.first_query + query) +
                                    (plan.first_key + key) * g.stride[3];
            weight_grad += Element<kDType>::widen(static_cast<const Storage*>(g.data)[element]);
          }
          const T score = tile.score_in_window(query, key, dot);
          weight = numbers.weight(score);
          const T added = gradient_of_statistics(p, a, plan.sequence, plan.head, first_row + query,
                                                 plan.first_key + key, score - numbers.shift);
          grad = numbers.score_grad(weight, weight_grad * keep + added);
          weight *= keep;
          if (tile.function_hides(score)) {
            weight = grad = -T(0);
          } else if (kOfProducts<kSide>) {
            grad = tile.function_gradient(query, key, dot, grad);
          }
          if (sum_slopes) slope = multiply_add(grad, -tile.distance(query, key), slope);
          if (kOfProducts<kSide> && p.softcap > 0.0 && !tile.function_hides(score)) {
            grad = grad * tile.softcap_slope(dot) + T(0);
          }
          if (kSide == Side::kCaptured) weight = tile.score_given(query, key, dot);
        }
        weights[at] = weight;
        grads[at] = grad;
      }
    }
    if (sum_slopes) {
      slope = sum_of_row(slope);
      if (thread_column() == 0) shared.row_sums[query] += slope;
    }
  }
}

// Turns the fragments of both products into W and ds in the panels. All threads have finished with the
// panels.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void weigh_tile(const AttentionParams& p, const BackwardArguments& a,
                                           const rows::RowGradients<T>& rows,
                                           const GradientShared<kDType, kSide>& shared, Fragment<T>& s,
                                           Fragment<T>& grad) {
  using Plan = GradientPlan<kDType, kSide>;
  const Plan& plan = *shared.plan;
  ScoreTile<T> tile(p, plan.sequence, plan.head, plan.first_query);
  tile.move_to(plan.first_key);
  const bool bare = tile.is_bare() && tile.rows() >= Plan::kQueries &&
                    tile.window_covers(Plan::kQueries, Plan::kKeys) && !p.dropout.enabled &&
                    a.grad_weights.data == nullptr && a.grad_slopes_rows == nullptr &&
                    a.grad_mean == nullptr && a.grad_keys == nullptr;
  if (bare) {
    const int64_t first_row = first_statistic_of(p, plan.sequence, plan.head) + plan.first_query;
    weigh_bare<kSide>(tile, rows, first_row, s, grad);
  }
  put_fragment<T>(shared.weights, s);
  put_fragment<T>(shared.score_grads, grad);
  if (!bare) {
    weigh_options<kDType, kSide>(p, a, tile, rows, shared);
  }
}

// Computes a tile: leaves W and ds in the panels, as far as warps have rows. Returns false, and leaves
// nothing there, if the mask hides all of the tile.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ bool gradient_tile(const AttentionParams& p, const BackwardArguments& a,
                                              const rows::RowGradients<T>& rows,
                                              const GradientShared<kDType, kSide>& shared, bool has_rows,
                                              bool needs_score_grads) {
  const GradientPlan<kDType, kSide>& plan = *shared.plan;
  if (!tile_is_seen(p, plan)) return false;
  Fragment<T> s, grad;
  // These are read from the plan where they are used, because they would take registers during both products.
  const auto queries = [&plan] { return RowRange{plan.query_rows, plan.first_query, plan.sequence.queries}; };
  const auto grads = [&plan] { return RowRange{plan.grad_rows, plan.first_query, plan.sequence.queries}; };
  const auto keys = [&plan] { return RowRange{plan.key_rows, plan.first_key, plan.sequence.keys}; };
  const auto values = [&plan] { return RowRange{plan.value_rows, plan.first_key, plan.sequence.keys}; };
  if (kRowsAreKeys<kSide>) {
    multiply_rows(shared, keys(), queries(), p.head_dim, has_rows, s);
    multiply_rows(shared, values(), grads(), needs_score_grads ? p.value_dim : 0, has_rows, grad);
  } else {
    multiply_rows(shared, queries(), keys(), p.head_dim, has_rows, s);
    multiply_rows(shared, grads(), values(), p.value_dim, has_rows, grad);
  }
  __syncthreads();  // ds replaces the rows of products
  if (has_rows) weigh_tile<kDType, kSide>(p, a, rows, shared, s, grad);
  return true;
}

}  // namespace selfattn::cuda::simt
