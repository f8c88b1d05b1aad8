// Computes outputs again whose sums overflowed, and rows whose scores are too large for a kernel.
//
// The forward adds up weights times values and divides by the sum of the weights at the end. With values near
// the largest number such a sum overflows, while the formula, which divides the weights first, gives their
// mean. Therefore elements that are not finite are computed once more, here, in the formula's order. An
// element that is NaN or infinite by the formula comes out so again, and no finite element changes a bit.
#pragma once

#include "../../core/visible_range.h"
#include "dropout.cuh"
#include "row_state.cuh"
#include "score_tile.cuh"

namespace selfattn::cuda {

// Sums of float16 numbers never overflow, because they are float.
template <DType kDType>
constexpr bool kMayOverflow = kDType != DType::kFloat16;

template <class T>
__device__ __forceinline__ bool is_finite_number(T x) {
  return x - x == T(0);
}

// A query's row and the keys that it sees, computed by the lanes of a warp.
template <DType kDType>
class FormulaRow {
  using E = Element<kDType>;
  using Storage = typename E::Storage;
  using T = typename E::Accumulation;

 public:
  __device__ __forceinline__ FormulaRow(const AttentionParams& params, int64_t batch, int64_t head,
                                        int64_t query)
      : p(params),
        sequence_(sequence_of(p, batch)),
        head_(head),
        query_(query),
        keys_(visible_keys(positions_of(p, sequence_), query, query)),
        tile_(p, sequence_, head, query),
        dropout_(p.dropout, batch, head) {}

  __device__ __forceinline__ int64_t offset(const View& view) const {
    return view.offset(sequence_.query_batch, head_, sequence_.first_query + query_);
  }

  // Computes maximum and sum of the row, with the sink.
  __device__ __forceinline__ void weigh() {
    RowState<T> own;
    for (int64_t key = keys_.begin + lane(); key < keys_.end; key += kWarp) own.raise_max(score(key));
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      own.raise_max(__shfl_xor_sync(kWholeWarp, own.max, lanes));
    }
    state_ = p.sinks.data != nullptr ? RowState<T>::of_sink(head_scalar<T>(p.sinks, sequence_.batch, head_))
                                     : RowState<T>();
    const T factor = state_.raise_max(own.max);
    for (int64_t key = keys_.begin + lane(); key < keys_.end; key += kWarp) {
      own.sum += exponential(score(key) - state_.shift());
    }
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      own.sum += __shfl_xor_sync(kWholeWarp, own.sum, lanes);
    }
    state_.sum = multiply_add(state_.sum, factor, own.sum);
  }

  // The output's element in the lane's column; 0 if the column does not exist.
  __device__ __forceinline__ T output(int64_t column) {
    const T inverse = state_.inverse_sum();
    T sum = T(0);
    for (int64_t first = keys_.begin; first < keys_.end; first += kWarp) {
      const int64_t own = first + lane();
      const T s = own < keys_.end ? score(own) : -infinity<T>();
      T weight = state_.weight(s, inverse);
      if (dropout_.enabled() && own < keys_.end) weight *= dropout_.factor(dropout_.words(query_, own), own);
      T part = T(0);  // summed separately, so that the errors of a long sum stay small
      for (int i = 0; i < kWarp && first + i < keys_.end; ++i) {
        const T of_key = __shfl_sync(kWholeWarp, weight, i);
        const bool hidden = __shfl_sync(kWholeWarp, s, i) == -infinity<T>();
        if (hidden || column >= p.value_dim) continue;
        part = multiply_add(of_key, E::widen(row_of(p.value, first + i)[column]), part);
      }
      sum += part;
    }
    return sum;
  }

  // Stores the lane's output element if it wants that. All lanes must call it.
  __device__ __forceinline__ void store_output(const ForwardOutputs& outputs, int64_t column, bool wants) {
    const T sum = output(column);
    if (!wants) return;
    const int64_t at = offset(outputs.out) + column;
    Storage& stored = static_cast<Storage*>(outputs.out.data)[at];
    stored = E::narrow(sum);
    if (outputs.out_residual == nullptr) return;
    static_cast<Storage*>(outputs.out_residual)[at] = E::narrow(sum - E::widen(stored));
  }

  __device__ __forceinline__ void store_statistics(const ForwardOutputs& outputs, int64_t at) const {
    if (lane() != 0) return;
    static_cast<T*>(outputs.row_max)[at] = state_.max;
    static_cast<T*>(outputs.row_sum)[at] = state_.sum;
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  __device__ __forceinline__ const Storage* row_of(const View& view, int64_t key) const {
    const auto* data = static_cast<const Storage*>(view.data);
    const int64_t kv_head = p.kv_head(head_);
    if (p.pages.table == nullptr) {
      return data + view.offset(sequence_.key_batch, kv_head, sequence_.first_key + key);
    }
    const PagedRow at = paged_row(p.pages, sequence_.batch, key);
    return data + view.offset(at.page, kv_head, at.row);
  }

  __device__ __forceinline__ T score(int64_t key) {
    const Storage* query = static_cast<const Storage*>(p.query.data) + offset(p.query);
    const Storage* row = row_of(p.key, key);
    T dot = T(0);
    for (int64_t e = 0; e < p.head_dim; ++e) dot = multiply_add(E::widen(query[e]), E::widen(row[e]), dot);
    tile_.move_to(key);
    return tile_.score(0, 0, dot);
  }

  const AttentionParams& p;
  const Sequence sequence_;
  const int64_t head_, query_;
  const KeyRange keys_;
  ScoreTile<T> tile_;
  DropoutPattern<T> dropout_;
  RowState<T> state_;
};

// Computes elements that are not finite again, in columns begin .. end - 1 of a row that this warp, or its
// block before a barrier, has stored. It is rare and therefore called, so that it takes no registers from the
// kernel.
template <DType kDType>
__device__ SELFATTN_CALLED void mend_overflow(const AttentionParams& p, const ForwardOutputs& outputs,
                                              int64_t batch, int64_t head, int64_t query, int64_t begin,
                                              int64_t end) {
  using E = Element<kDType>;
  using Storage = typename E::Storage;
  FormulaRow<kDType> row(p, batch, head, query);
  const Storage* const out = static_cast<const Storage*>(outputs.out.data) + row.offset(outputs.out);
  bool weighed = false;
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t column = first + static_cast<int64_t>(threadIdx.x) % kWarp;
    const bool broken = column < end && !is_finite_number(E::widen(out[column]));
    if (!__any_sync(kWholeWarp, broken)) continue;
    if (!weighed) row.weigh();
    weighed = true;
    row.store_output(outputs, column, broken);
  }
}

// Computes a whole row and its statistics, which are stored at `statistic`. It is rare and therefore called,
// too.
template <DType kDType>
__device__ SELFATTN_CALLED void compute_row(const AttentionParams& p, const ForwardOutputs& outputs,
                                            int64_t batch, int64_t head, int64_t query, int64_t statistic) {
  FormulaRow<kDType> row(p, batch, head, query);
  row.weigh();
  row.store_statistics(outputs, statistic);
  for (int64_t first = 0; first < p.value_dim; first += kWarp) {
    const int64_t column = first + static_cast<int64_t>(threadIdx.x) % kWarp;
    row.store_output(outputs, column, column < p.value_dim);
  }
}

}  // namespace selfattn::cuda
