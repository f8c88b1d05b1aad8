// A tile of forward mode and of second derivatives.
//
// It turns the products q·k, tq·k + q·tk, dO·v and dO·tv of queries and keys into the terms that a step adds
// up. The formulas and their names are those of Note [Formulas of tangents] in core/tangents.h.
#pragma once

#include "../../core/tangents.h"
#include "../common/row_state.cuh"
#include "gradient_tile.cuh"
#include "key_rows.cuh"

namespace selfattn::cuda::simt {

// Blocks that own queries compute these steps in successive launches, because each step needs the last one's
// results over all keys. Blocks that own keys or a part of the mask have only the kGradient step.
enum class TangentStep { kMean, kOut, kGradient };

// Numbers of every row, in arrays with the layout of the forward's row statistics.
template <class T>
struct TangentRows {
  const T *max, *sum;
  T* mean;         // m_i, the tangent of lse; kMean computes it
  const T* delta;  // null in forward mode
  T* correction;   // c_i, null in forward mode; kOut computes it
};

// The numbers of one row that are known in a step.
template <class T>
struct TangentNumbers {
  RowState<T> state;
  T inverse_sum, mean, delta, correction;

  __device__ __forceinline__ TangentNumbers(const TangentRows<T>& rows, TangentStep step, int64_t row)
      : state{rows.max[row], rows.sum[row]},
        inverse_sum(state.inverse_sum()),
        mean(step != TangentStep::kMean ? rows.mean[row] : T(0)),
        delta(rows.delta != nullptr ? rows.delta[row] : T(0)),
        correction(step == TangentStep::kGradient ? rows.correction[row] : T(0)) {}

  __device__ __forceinline__ bool is_dead() const { return inverse_sum == T(0); }
  __device__ __forceinline__ T weight(T score) const { return state.weight(score, inverse_sum); }
};

// A block's shared memory, with one more panel. Rows of products lie there, because the other panels hold
// finished products at that time.
template <DType kDType, Side kSide>
struct TangentShared : GradientShared<kDType, kSide> {
  using Base = GradientShared<kDType, kSide>;
  using typename Base::T;
  static constexpr size_t kBytes = Base::kBytes + kWeightPanel<T> * sizeof(T);
  static constexpr int kOwnKeys = kRowsAreKeys<kSide> ? kRowsPerThread<T> : kColumnsPerThread;
  static_assert(2 * kOwnKeys * kThreads <= kColumnPanel<T>, "slots lie where columns of products did");

  T* deviations;  // kWeightPanel: keep P (T - m)

  __device__ __forceinline__ explicit TangentShared(unsigned char* memory)
      : Base(memory), deviations(reinterpret_cast<T*>(memory + Base::kBytes)) {
    this->product_rows = deviations;
  }

  // The thread's own numbers of dO·v and dO·tv for one query and each of its keys. They are not in registers,
  // because a loop cannot index these.
  __device__ __forceinline__ T& slot(int which, int key) const {
    return this->columns[(which * kOwnKeys + key) * kThreads + static_cast<int>(threadIdx.x)];
  }

  // Moves the first of the fragment's queries to the slots. The others move up in the fragment.
  __device__ __forceinline__ void take_query(int which, Fragment<T>& fragment) const {
#pragma unroll
    for (int r = 0; r < kRowsPerThread<T>; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) {
        const int query = kRowsAreKeys<kSide> ? c : r, key = kRowsAreKeys<kSide> ? r : c;
        if (query == 0) slot(which, key) = fragment[r][c];
        const int next_r = r + (kRowsAreKeys<kSide> ? 0 : 1), next_c = c + (kRowsAreKeys<kSide> ? 1 : 0);
        if (next_r < kRowsPerThread<T> && next_c < kColumnsPerThread) {
          fragment[r][c] = fragment[next_r][next_c];
        }
      }
    }
  }
};

// The terms of a visible pair of query and key. All are 0 if its weight is.
template <class T>
struct TangentPair {
  T weight = T(0);
  T tangent = T(0);         // T_ij
  T kept_weight = T(0);     // keep_ij P_ij
  T kept_deviation = T(0);  // keep_ij P_ij (T_ij - m_i)
  T share = T(0);           // P_ij A_ij
  T score = T(0);           // g_ij
  T dot = T(0);             // x_ij
  T first_dot = T(0);       // cap'_ij ds_ij
};

template <class T>
__device__ __forceinline__ TangentPair<T> tangent_pair(const AttentionParams& p, const ScoreTile<T>& tile,
                                                       const TangentNumbers<T>& n, int query, int key, T dot,
                                                       T dot_tangent, T added_tangent, T of_value,
                                                       T of_tangent, T keep) {
  TangentPair<T> pair;
  pair.weight = n.weight(tile.score_in_window(query, key, dot));
  if (pair.weight == T(0)) return pair;
  const bool capped = p.softcap > 0.0;
  const T slope = capped ? tile.softcap_slope(dot) : T(1);
  const T curvature = capped ? tile.softcap_curvature(dot) : T(0);
  pair.tangent = slope * dot_tangent + added_tangent;
  const T deviation = pair.tangent - n.mean, grad_weight = keep * of_value;
  const T a = grad_weight * deviation - n.delta * pair.tangent + keep * of_tangent;
  const T first = pair.weight * (grad_weight - n.delta);  // ds_ij
  pair.kept_weight = keep * pair.weight;
  pair.kept_deviation = pair.kept_weight * deviation;
  pair.share = pair.weight * a;
  pair.score = pair.weight * (a - n.correction);
  pair.dot = slope * pair.score + curvature * first * dot_tangent;
  pair.first_dot = slope * first;
  return pair;
}

// The tangent of the terms that are added to capped scores: ALiBi and the mask.
template <class T>
class AddedTangent {
 public:
  __device__ __forceinline__ AddedTangent(const Tangents& t, const Sequence& sequence, int64_t head,
                                          int64_t first_query, int64_t first_key)
      : mask_(t.mask),
        slope_(t.alibi_slopes.data != nullptr ? head_scalar<T>(t.alibi_slopes, sequence.batch, head) : T(0)),
        corner_(mask_.offset(sequence.batch, head, first_query) + first_key * mask_.stride[3]) {}

  __device__ __forceinline__ T of(const ScoreTile<T>& tile, int query, int key) const {
    T sum = T(0);
    if (slope_ != T(0)) sum -= slope_ * tile.distance(query, key);
    if (mask_.data != nullptr) {
      const int64_t at = corner_ + query * mask_.stride[2] + key * mask_.stride[3];
      sum += load_element<T>(mask_.data, mask_.dtype, at);
    }
    return sum;
  }

 private:
  const View& mask_;
  const T slope_;
  const int64_t corner_;  // the mask's element for the tile's first query and key
};

// Replaces the first two products, in the panels, by the terms of the results' sums, which are -0 for hidden
// pairs and never -0 for others: see is_hidden. In kOut these are weights, and weights times deviations. In
// kGradient they are the factors of queries or keys and of their tangents; for a mask, the second panel gets
// the mask's own gradient. Adds to the step's sums of rows.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void weigh_tangents(const AttentionParams& p, const BackwardBackwardArguments& a,
                                               const TangentRows<T>& rows, TangentStep step,
                                               const TangentShared<kDType, kSide>& shared,
                                               Fragment<T>& of_values, Fragment<T>& of_tangents) {
  constexpr bool kByKeys = kRowsAreKeys<kSide>;
  constexpr int kOwnQueries = kByKeys ? kColumnsPerThread : kRowsPerThread<T>;
  constexpr int kOwnKeys = TangentShared<kDType, kSide>::kOwnKeys;
  const GradientPlan<kDType, kSide>& plan = *shared.plan;
  ScoreTile<T> tile(p, plan.sequence, plan.head, plan.first_query);
  tile.move_to(plan.first_key);
  const int64_t first_row = first_statistic_of(p, plan.sequence, plan.head) + plan.first_query;
  const DropoutPattern<T> dropout(p.dropout, plan.sequence.batch, plan.head);
  const AddedTangent<T> added(a.tangents, plan.sequence, plan.head, plan.first_query, plan.first_key);

#pragma unroll 1
  for (int q = 0; q < kOwnQueries; ++q) {
    const int query = kByKeys ? fragment_column<T>(q) : fragment_row<T>(q);
    // A row that does not exist takes the numbers of another: the window shows nothing of it.
    const TangentNumbers<T> numbers(rows, step, first_row + (query < tile.rows() ? query : 0));
    shared.take_query(0, of_values);
    shared.take_query(1, of_tangents);
    T sum = T(0);
#pragma unroll 1
    for (int k = 0; k < kOwnKeys; ++k) {
      const int key = kByKeys ? fragment_row<T>(k) : fragment_column<T>(k);
      const int at = kByKeys ? panel_index<T, kRows<T>>(query, key) : panel_index<T, kRows<T>>(key, query);
      T first = -T(0), second = -T(0), deviation = -T(0);
      if (!numbers.is_dead() && tile.window_shows(query, key) && tile.mask_shows(query, key)) {
        T keep = T(1);
        if (dropout.enabled()) {
          const int64_t j = plan.first_key + key;
          keep = dropout.factor(dropout.words(plan.first_query + query, j), j);
        }
        const TangentPair<T> pair = tangent_pair(
            p, tile, numbers, query, key, shared.weights[at], tile.scaled(shared.score_grads[at]),
            added.of(tile, query, key), shared.slot(0, k), shared.slot(1, k), keep);
        deviation = pair.kept_deviation + T(0);
        if (step == TangentStep::kMean) {
          sum = multiply_add(pair.weight, pair.tangent, sum);
        } else if (step == TangentStep::kOut) {
          first = deviation;
          second = pair.kept_weight + T(0);
          sum += pair.share;
        } else {
          first = pair.dot + T(0);
          second = (kSide == Side::kMask ? pair.score : pair.first_dot) + T(0);
          if (kSide == Side::kQuery) sum = multiply_add(pair.score, -tile.distance(query, key), sum);
        }
      }
      shared.weights[at] = first;
      shared.score_grads[at] = second;
      if (kByKeys) shared.deviations[at] = deviation;
    }
    if (kSide == Side::kQuery) {
      sum = sum_of_row(sum);
      if (thread_column() == 0) shared.row_sums[query] += sum;
    }
  }
}

// Computes a tile. Returns false, and leaves nothing, if the mask hides all of it. Products of a missing
// tensor are left out, and so are those with dO if no result needs them.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ bool tangent_tile(const AttentionParams& p, const BackwardBackwardArguments& a,
                                             const TangentRows<T>& rows, TangentStep step,
                                             const TangentShared<kDType, kSide>& shared, bool has_rows,
                                             bool needs_score_grads) {
  const GradientPlan<kDType, kSide>& plan = *shared.plan;
  if (!tile_is_seen(p, plan)) return false;
  const Sequence& s = plan.sequence;
  Fragment<T> sum, of_values;
  clear<T>(sum);
  clear<T>(of_values);
#pragma unroll 1
  for (int n = 0; n < (needs_score_grads ? 5 : 3); ++n) {
    const View& query_side = n == 1 ? a.tangents.query : n < 3 ? p.query : a.backward.grad_out;
    const View& key_side = n < 2 ? p.key : n == 2 ? a.tangents.key : n == 3 ? p.value : a.tangents.value;
    if (query_side.data != nullptr && key_side.data != nullptr) {
      const RowSource<kDType> queries(query_side, s.query_batch, plan.head, s.first_query);
      const KeyRows<kDType> keys(key_side, p.pages, s, p.kv_head(plan.head));
      const RowRange of_queries{queries, plan.first_query, s.queries};
      const RowRange of_keys{keys, plan.first_key, s.keys};
      const int64_t dims = n < 3 ? p.head_dim : p.value_dim;
      if constexpr (kRowsAreKeys<kSide>) {
        add_product_of_rows(shared, of_keys, of_queries, dims, has_rows, sum);
      } else {
        add_product_of_rows(shared, of_queries, of_keys, dims, has_rows, sum);
      }
    }
    if (n == 0 || n == 2) put_fragment<T>(n == 0 ? shared.weights : shared.score_grads, sum);
    if (n == 3) for_each_number<T>([&](int r, int c) { of_values[r][c] = sum[r][c]; });
    if (n == 0 || n == 2 || n == 3) clear<T>(sum);
  }
  __syncthreads();  // slots and deviations replace operands
  if (has_rows) weigh_tangents<kDType, kSide>(p, a, rows, step, shared, of_values, sum);
  return true;
}

}  // namespace selfattn::cuda::simt
