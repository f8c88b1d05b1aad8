// Moves rows between tensors and scratch: converts to T, pads, transposes. T is the type of the sums.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

template <class T>
constexpr DType dtype_of() {
  return sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
}

template <class T>
int64_t round_up_to_vector(int64_t n) {
  return round_up(n, Simd<T>::kWidth);
}

inline const void* element(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}
inline void* element(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

// load_row and store_row use these for less than a vector, where the instruction set has no parts of vectors,
// and for types that no instruction converts. They are out of line: every loop over rows would hold them, and
// they take ten times the code of the rest.
template <class T>
__attribute__((noinline)) void load_elements(const void* data, DType dtype, int64_t n, T* buffer) {
  for (int64_t i = 0; i < n; ++i) buffer[i] = load_element<T>(data, dtype, i);
}
template <class T>
__attribute__((noinline)) void store_elements(void* data, DType dtype, int64_t n, const T* buffer) {
  for (int64_t i = 0; i < n; ++i) store_element<T>(data, dtype, i, buffer[i]);
}

// Loads one vector of n <= kWidth neighbouring elements; zeros fill the rest and nothing beyond them is read.
template <class T>
SELFATTN_INLINE typename Simd<T>::Vec load_row(const void* data, DType dtype, int64_t n) {
  using S = Simd<T>;
  if (n >= S::kWidth) {
    if (dtype == dtype_of<T>()) return S::load(static_cast<const T*>(data));
    if constexpr (sizeof(T) == 4) {
      if (dtype == DType::kBFloat16) return S::load_bfloat16(static_cast<const uint16_t*>(data));
      if (dtype == DType::kFloat16) return S::load_float16(static_cast<const uint16_t*>(data));
    }
  } else if constexpr (S::kLoadsParts) {
    if (dtype == dtype_of<T>()) return S::load_part(static_cast<const T*>(data), n);
    if constexpr (sizeof(T) == 4) {
      if (dtype == DType::kBFloat16) return S::load_bfloat16_part(static_cast<const uint16_t*>(data), n);
      if (dtype == DType::kFloat16) return S::load_float16_part(static_cast<const uint16_t*>(data), n);
    }
  }
  T buffer[S::kWidth] = {};
  load_elements<T>(data, dtype, smaller(n, S::kWidth), buffer);
  return S::load(buffer);
}

template <class T>
SELFATTN_INLINE void store_row(void* data, DType dtype, int64_t n, typename Simd<T>::Vec v) {
  using S = Simd<T>;
  if (n >= S::kWidth) {
    if (dtype == dtype_of<T>()) return S::store(static_cast<T*>(data), v);
    if constexpr (sizeof(T) == 4) {
      if (dtype == DType::kBFloat16) return S::store_bfloat16(static_cast<uint16_t*>(data), v);
      if (dtype == DType::kFloat16) return S::store_float16(static_cast<uint16_t*>(data), v);
    }
  } else if constexpr (S::kLoadsParts) {
    if (dtype == dtype_of<T>()) return S::store_part(static_cast<T*>(data), n, v);
    if constexpr (sizeof(T) == 4) {
      if (dtype == DType::kBFloat16) return S::store_bfloat16_part(static_cast<uint16_t*>(data), n, v);
      if (dtype == DType::kFloat16) return S::store_float16_part(static_cast<uint16_t*>(data), n, v);
    }
  }
  T buffer[S::kWidth];
  S::store(buffer, v);
  store_elements<T>(data, dtype, smaller(n, S::kWidth), buffer);
}

// Stores n elements of a result at `index`, and what the conversion to dtype took away at the same place of
// the residual (nullable).
template <class T>
SELFATTN_INLINE void store_with_residual(void* data, void* residual, DType dtype, int64_t index, int64_t n,
                                         typename Simd<T>::Vec v) {
  store_row<T>(element(data, dtype, index), dtype, n, v);
  if (residual != nullptr) {
    const auto stored = load_row<T>(element(data, dtype, index), dtype, n);
    store_row<T>(element(residual, dtype, index), dtype, n, Simd<T>::sub(v, stored));
  }
}

// Prefetches `rows` rows of `bytes` bytes, `stride` bytes apart.
inline void prefetch_block(const void* data, int64_t stride, int64_t rows, int64_t bytes) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(static_cast<const char*>(data) + row * stride + at);
    }
  }
}

// Transposes kWidth vectors in place by log2(kWidth) rounds of interleaving the first half with the second.
template <class T>
SELFATTN_INLINE void transpose(typename Simd<T>::Vec (&rows)[Simd<T>::kWidth]) {
  using S = Simd<T>;
  constexpr int kHalf = S::kWidth / 2;
  SELFATTN_UNROLL
  for (int span = 1; span < S::kWidth; span *= 2) {
    typename S::Vec next[S::kWidth];
    SELFATTN_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = S::interleave_low(rows[i], rows[i + kHalf]);
      next[2 * i + 1] = S::interleave_high(rows[i], rows[i + kHalf]);
    }
    SELFATTN_UNROLL
    for (int i = 0; i < S::kWidth; ++i) rows[i] = next[i];
  }
}

// dst[column * ld + lane] = factor * src(row lane, column) for `rows` rows, with zeros in the lanes up to a
// whole vector. Source columns are neighbours in memory; rows are row_stride elements apart.
template <class T>
void load_transposed(T* dst, int64_t ld, const void* src, DType dtype, int64_t row_stride, int64_t rows,
                     int64_t columns, T factor) {
  using S = Simd<T>;
  const auto scale = S::set(factor);
  for (int64_t lane = 0; lane < rows; lane += S::kWidth) {
    const int64_t lanes = smaller(rows - lane, S::kWidth);
    for (int64_t column = 0; column < columns; column += S::kWidth) {
      const int64_t n = smaller(columns - column, S::kWidth);
      typename S::Vec tile[S::kWidth];
      // Whole vectors stay in registers all the way.
      if (n == S::kWidth && dtype == dtype_of<T>()) {
        const T* from = static_cast<const T*>(src) + lane * row_stride + column;
        if (lanes == S::kWidth) {
          SELFATTN_UNROLL
          for (int i = 0; i < S::kWidth; ++i) tile[i] = S::load(from + i * row_stride);
        } else {
          SELFATTN_UNROLL
          for (int i = 0; i < S::kWidth; ++i) {
            tile[i] = i < lanes ? S::load(from + i * row_stride) : S::set(T(0));
          }
        }
        transpose<T>(tile);
        T* to = dst + column * ld + lane;
        SELFATTN_UNROLL
        for (int i = 0; i < S::kWidth; ++i) S::store(to + i * ld, S::mul(tile[i], scale));
        continue;
      }
      for (int i = 0; i < S::kWidth; ++i) {
        tile[i] = i < lanes ? load_row<T>(element(src, dtype, (lane + i) * row_stride + column), dtype, n)
                            : S::set(T(0));
      }
      transpose<T>(tile);
      for (int64_t i = 0; i < n; ++i) S::store(dst + (column + i) * ld + lane, S::mul(tile[i], scale));
    }
  }
}

// dst(row lane, column) = src[column * ld + lane] * lane_scale[lane], converted to dtype. `residual`
// (nullable) is laid out like dst and receives what the conversion took away.
template <class T>
void store_transposed(void* dst, DType dtype, int64_t row_stride, int64_t rows, int64_t columns, const T* src,
                      int64_t ld, const T* lane_scale, void* residual = nullptr) {
  using S = Simd<T>;
  for (int64_t lane = 0; lane < rows; lane += S::kWidth) {
    const auto scale = S::load(lane_scale + lane);
    const int64_t lanes = smaller(rows - lane, S::kWidth);
    for (int64_t column = 0; column < columns; column += S::kWidth) {
      const int64_t n = smaller(columns - column, S::kWidth);
      typename S::Vec tile[S::kWidth];
      // Whole vectors stay in registers all the way.
      if (n == S::kWidth && dtype == dtype_of<T>() && residual == nullptr) {
        const T* from = src + column * ld + lane;
        SELFATTN_UNROLL
        for (int i = 0; i < S::kWidth; ++i) tile[i] = S::mul(S::load(from + i * ld), scale);
        transpose<T>(tile);
        T* to = static_cast<T*>(dst) + lane * row_stride + column;
        SELFATTN_UNROLL
        for (int i = 0; i < S::kWidth; ++i) {
          if (i < lanes) S::store(to + i * row_stride, tile[i]);
        }
        continue;
      }
      if constexpr (sizeof(T) == 4) {
        if (dtype == DType::kBFloat16 && n == S::kWidth && lanes == S::kWidth) {
          const T* from = src + column * ld + lane;
          SELFATTN_UNROLL
          for (int i = 0; i < S::kWidth; ++i) tile[i] = S::mul(S::load(from + i * ld), scale);
          transpose<T>(tile);
          SELFATTN_UNROLL
          for (int i = 0; i < S::kWidth; ++i) {
            store_with_residual<T>(dst, residual, DType::kBFloat16, (lane + i) * row_stride + column,
                                   S::kWidth, tile[i]);
          }
          continue;
        }
      }
      for (int i = 0; i < S::kWidth; ++i) {
        tile[i] = i < n ? S::mul(S::load(src + (column + i) * ld + lane), scale) : S::set(T(0));
      }
      transpose<T>(tile);
      for (int64_t i = 0; i < lanes; ++i) {
        store_with_residual<T>(dst, residual, dtype, (lane + i) * row_stride + column, n, tile[i]);
      }
    }
  }
}

// dst[column] = factor * src[column] for `columns` neighbouring elements, with zeros up to a whole vector.
// The element type is tested once per row: a test for every vector would cost more than the conversion.
template <class T>
void load_padded_row(T* dst, const void* src, DType dtype, int64_t columns, T factor) {
  using S = Simd<T>;
  const auto scale = S::set(factor);
  int64_t column = 0;
  if (dtype == dtype_of<T>()) {
    const T* numbers = static_cast<const T*>(src);
    for (; column + S::kWidth <= columns; column += S::kWidth) {
      S::store(dst + column, S::mul(S::load(numbers + column), scale));
    }
  }
  if constexpr (sizeof(T) == 4) {
    const uint16_t* bits = static_cast<const uint16_t*>(src);
    if (dtype == DType::kBFloat16) {
      for (; column + S::kWidth <= columns; column += S::kWidth) {
        S::store(dst + column, S::mul(S::load_bfloat16(bits + column), scale));
      }
    } else if (dtype == DType::kFloat16) {
      for (; column + S::kWidth <= columns; column += S::kWidth) {
        S::store(dst + column, S::mul(S::load_float16(bits + column), scale));
      }
    }
  }
  for (; column < columns; column += S::kWidth) {
    const auto x = load_row<T>(element(src, dtype, column), dtype, columns - column);
    S::store(dst + column, S::mul(x, scale));
  }
}

// dst[row][padded] = factor * src(row, column), with zeros in the padding.
template <class T>
void load_rows(T* dst, const void* src, DType dtype, int64_t row_stride, int64_t rows, int64_t columns,
               T factor) {
  const int64_t padded = round_up_to_vector<T>(columns);
  for (int64_t row = 0; row < rows; ++row) {
    load_padded_row<T>(dst + row * padded, element(src, dtype, row * row_stride), dtype, columns, factor);
  }
}

// Neighbouring rows of one (batch, head) of a tensor.
struct RowSource {
  const void* data;
  DType dtype;
  int64_t stride, rows, columns;
  bool is_gradient = false;  // gradients may be much smaller than data

  RowSource from(int64_t row, int64_t count) const {
    return {element(data, dtype, row * stride), dtype, stride, count, columns, is_gradient};
  }
  RowSource as_gradient() const { return {data, dtype, stride, rows, columns, true}; }
};

inline RowSource row_source(const View& view, DType dtype, int64_t batch, int64_t head, int64_t first,
                            int64_t rows, int64_t columns) {
  return {element(view.data, dtype, view.offset(batch, head, first)), dtype, view.stride[2], rows, columns};
}

// Prefetches rows that will be needed soon. Without it, loading pieces spends half of its time on reading.
inline void ask_for_rows(const RowSource& s, int64_t row, int64_t rows) {
  const int64_t bytes = size_of(s.dtype);
  prefetch_block(element(s.data, s.dtype, row * s.stride), s.stride * bytes, rows, s.columns * bytes);
}

// Rows of a tensor as T.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// Returns the tensor's own memory if it already holds T and needs no padding; otherwise a converted copy in
// `buffer` with rows padded by zeros to whole vectors.
template <class T>
Rows<T> rows_as(const RowSource& s, bool whole_vectors, T* buffer) {
  if (s.dtype == dtype_of<T>() && !(whole_vectors && s.columns % Simd<T>::kWidth != 0)) {
    return {static_cast<const T*>(s.data), s.stride};
  }
  load_rows<T>(buffer, s.data, s.dtype, s.stride, s.rows, s.columns, T(1));
  return {buffer, round_up_to_vector<T>(s.columns)};
}

// Whether every lane is zero; NaN is not.
template <class T>
SELFATTN_INLINE bool all_zero(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  const auto zero = S::set(T(0));
  return !S::any(S::less(zero, S::select(S::equal(x, zero), zero, S::set(T(1)))));
}

template <class T>
bool all_finite(const T* data, int64_t stride, int64_t rows, int64_t columns) {
  using S = Simd<T>;
  // x * 0 is 0 for finite x and NaN otherwise, and NaN survives addition. There are four sums, of four rows
  // or of four vectors of the last ones, since one would wait for its own latency.
  constexpr int kSums = 4;
  const auto zero = S::set(T(0));
  const int64_t whole = columns / S::kWidth * S::kWidth;
  typename S::Vec sums[kSums] = {zero, zero, zero, zero};
  int64_t row = 0;
  for (; row + kSums <= rows; row += kSums) {
    for (int64_t column = 0; column < whole; column += S::kWidth) {
      const T* at = data + row * stride + column;
      SELFATTN_UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] = S::fma(S::load(at + i * stride), zero, sums[i]);
    }
  }
  for (; row < rows; ++row) {
    const T* at = data + row * stride;
    int64_t column = 0;
    for (; column + kSums * S::kWidth <= whole; column += kSums * S::kWidth) {
      SELFATTN_UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] = S::fma(S::load(at + column + i * S::kWidth), zero, sums[i]);
    }
    for (; column < whole; column += S::kWidth) sums[0] = S::fma(S::load(at + column), zero, sums[0]);
  }
  T rest = 0;
  for (row = 0; whole < columns && row < rows; ++row) {
    for (int64_t column = whole; column < columns; ++column) rest += data[row * stride + column] * T(0);
  }
  return rest == T(0) && all_zero<T>(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
}

}  // namespace selfattn::cpu::SELFATTN_ISA
