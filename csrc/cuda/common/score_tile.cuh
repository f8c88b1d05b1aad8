// From q·k to final scores: scale, softcap, ALiBi, the call's function, mask and window.
//
// Kernels compute scores in tiles: rows are neighbouring queries, columns are neighbouring keys. Positions
// are 64-bit numbers, but 32 bits are enough within a tile: the window of the query in `row` is columns row +
// window_begin .. row + window_end, because windows move with the query.
#pragma once

#include "../../core/attention_params.h"
#include "../function/function_tile.cuh"
#include "element.cuh"
#include "elementary.cuh"
#include "sequence.cuh"

namespace selfattn::cuda {

// The scores of one head of a sequence from query `first_query` on. T is the accumulation type.
template <class T>
class ScoreTile {
 public:
  // Keeps a reference to the parameters, because reading them there costs no registers.
  __device__ __forceinline__ ScoreTile(const AttentionParams& params, const Sequence& sequence, int64_t head,
                                       int64_t first_query)
      : p(params),
        scale_(static_cast<T>(p.scale)),
        slope_(p.alibi_slopes.data != nullptr ? head_scalar<T>(p.alibi_slopes, sequence.batch, head) : T(0)),
        row_of_mask_(p.mask.offset(sequence.batch, head, first_query)),
        position_(first_query + sequence.query_offset),
        keys_(sequence.keys),
        rows_(clamp(sequence.queries - first_query)),
        function_(p.function, sequence.batch, head, first_query) {
    move_to(0);
  }

  // Makes `first_key` column 0.
  __device__ __forceinline__ void move_to(int64_t first_key) {
    corner_ = position_ - first_key;
    columns_ = clamp(keys_ - first_key);
    window_begin_ = p.window_left >= 0 ? clamp(corner_ - p.window_left) : -kFar;
    window_end_ = p.window_right >= 0 ? clamp(corner_ + p.window_right) : kFar;
    mask_at_ = row_of_mask_ + first_key * p.mask.stride[3];
    function_.move_to(first_key);
    function_.see(function_.seen_tile(kTallest, kTallest));
  }

  // Rows and columns of the tile that lie in the sequence.
  __device__ __forceinline__ int rows() const { return rows_; }
  __device__ __forceinline__ int columns() const { return columns_; }

  // Whether the window shows all these columns to all these rows, so that window_shows need not be asked.
  __device__ __forceinline__ bool window_covers(int rows, int columns) const {
    const int last_row = min(rows, rows_) - 1;
    return columns <= columns_ && window_begin_ <= -last_row && window_end_ >= columns - 1;
  }

  // Whether a score in the window is just scale · q·k. It is asked for each tile and therefore reads the
  // fields of those options that simt declares (simt.cpp) and score_in_window applies.
  __device__ __forceinline__ bool is_bare() const {
    return p.mask.data == nullptr && p.softcap == 0.0 && slope_ == T(0) && !FunctionTile<T>::kAny;
  }

  // Whether mask_shows may hide anything.
  __device__ __forceinline__ bool has_mask() const { return p.mask.data != nullptr || function_.has_map(); }

  // Whether the window shows an element; false outside of the sequence.
  __device__ __forceinline__ bool window_shows(int row, int column) const {
    return row < rows_ && column < columns_ && column - row >= window_begin_ && column - row <= window_end_;
  }

  // Whether the mask and the function's map show an element that the window shows.
  __device__ __forceinline__ bool mask_shows(int row, int column) const {
    return (p.mask.data == nullptr || bias(row, column) != -infinity<T>()) && function_.shows(row, column);
  }
  // Whether the function has hidden an element with this final score.
  __device__ __forceinline__ bool function_hides(T score) const {
    return FunctionTile<T>::kAny && score == -infinity<T>();
  }

  __device__ __forceinline__ T scale() const { return scale_; }
  __device__ __forceinline__ T scaled(T dot) const { return rounded_product(scale_, dot); }

  // The final score of an element that the window shows; -inf if the mask hides it, whatever `dot` is.
  __device__ __forceinline__ T score_in_window(int row, int column, T dot) const {
    T s = function_.score(row, column, score_given(row, column, dot));
    if (p.mask.data != nullptr) {
      const T b = bias(row, column);
      s = b == -infinity<T>() ? b : s + b;
    }
    return s;
  }

  // The distance of query and key. ALiBi subtracts its product with the slope.
  __device__ __forceinline__ T distance(int row, int column) const {
    const int64_t distance = corner_ + (row - column);
    return static_cast<T>(distance < 0 ? -distance : distance);
  }

  // Turns the gradient of the function's result into that of the score that it was given.
  __device__ __forceinline__ T function_gradient(int row, int column, T dot, T grad) const {
    if (!FunctionTile<T>::kAny) return grad;
    return function_.gradient(row, column, score_given(row, column, dot), grad);
  }

  // See FunctionTile.
  __device__ __forceinline__ auto captured_part(int load, int row, int column, T given, T grad) const {
    return function_.captured_part(load, row, column, given, grad);
  }

  // The score that the function is given: before function and mask.
  __device__ __forceinline__ T score_given(int row, int column, T dot) const {
    T s = scaled(dot);
    if (p.softcap > 0.0) {
      const T cap = static_cast<T>(p.softcap);
      s = rounded_product(cap, hyperbolic_tangent(s / cap));
    }
    if (slope_ != T(0)) s -= rounded_product(slope_, distance(row, column));
    return s;
  }

  // d softcap(s) / ds where s is scaled(dot).
  __device__ __forceinline__ T softcap_slope(T dot) const {
    const T t = hyperbolic_tangent(scaled(dot) / static_cast<T>(p.softcap));
    return T(1) - t * t;
  }

  // The derivative of softcap_slope with respect to s.
  __device__ __forceinline__ T softcap_curvature(T dot) const {
    const T cap = static_cast<T>(p.softcap), t = hyperbolic_tangent(scaled(dot) / cap);
    return T(-2) * t * (T(1) - t * t) / cap;
  }

  // The final score of any element: -inf if any rule hides it, or if it lies outside of the sequence.
  __device__ __forceinline__ T score(int row, int column, T dot) const {
    return window_shows(row, column) ? score_in_window(row, column, dot) : -infinity<T>();
  }

 private:
  // The most rows, and the most columns, of a tile that elements are asked about.
  static constexpr int kTallest = 64;

  // A distance beyond any tile, small enough that a sum of two fits an int.
  static constexpr int kFar = 1 << 29;

  static __device__ __forceinline__ int clamp(int64_t n) { return static_cast<int>(limited(n, -kFar, kFar)); }

  // The number that the mask adds: 0 or -inf for a boolean mask.
  __device__ __forceinline__ T bias(int row, int column) const {
    const int64_t index = mask_at_ + row * p.mask.stride[2] + column * p.mask.stride[3];
    const T x = load_element<T>(p.mask.data, p.mask.dtype, index);
    if (p.mask.dtype != DType::kBool) return x;
    return x != T(0) ? T(0) : -infinity<T>();
  }

  const AttentionParams& p;
  const T scale_, slope_;
  const int64_t row_of_mask_;  // the mask's element for row 0 and key 0
  const int64_t position_;     // of row 0 among the keys
  const int64_t keys_;
  const int rows_;
  FunctionTile<T> function_;

  // These belong to the current first key.
  int64_t corner_;  // position of row 0 minus that of column 0
  int64_t mask_at_;
  int columns_, window_begin_, window_end_;
};

}  // namespace selfattn::cuda
