// Visibility within a block of scores: the mask's block, transposed, and the limits of windows.
#pragma once

#include "../products/tensor_rows.h"
#include "query_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Buffers for one block, which one strip after another can use.
template <class P>
struct BlockScratch {
  using T = Scalar<P>;

  T* mask;       // [kKeyBlock][kLanes] additive mask, -inf where hidden
  T* first_key;  // [kLanes] first and one past the last key of the block that the lane's query may see, by
                 // position
  T* end_key;    // [kLanes]
  // These two are kept for the backward, and nullptr in the forward.
  T* capped;  // [kKeyBlock][kLanes] tanh of the softcap
  T* given;   // [kKeyBlock][kLanes] what the call's function is given; nullptr if its gradient needs none

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, bool backward, Arena& arena) {
    mask = arena.take<T>(kKeyBlock * kLanes<P>);
    first_key = arena.take<T>(kLanes<P>);
    end_key = arena.take<T>(kLanes<P>);
    capped = backward ? arena.take<T>(kKeyBlock * kLanes<P>) : nullptr;
    given = backward && p.function.keeps_scores() ? arena.take<T>(kKeyBlock * kLanes<P>) : nullptr;
  }
};

template <class P>
void load_bool_transposed(Scalar<P>* mask, const uint8_t* source, int64_t row_stride,
                          const QueryStrip<P>& strip, int64_t keys) {
  using T = Scalar<P>;
  using S = Simd<T>;
  for (int64_t lane = 0; lane < strip.count; lane += S::kWidth) {
    if (strip.count - lane <= S::kWidth / 4) {  // a transpose would move zeros
      for (int64_t j = 0; j < keys; ++j) {
        T* to = mask + j * kLanes<P> + lane;
        S::store(to, S::set(T(0)));
        for (int64_t i = 0; i < strip.count - lane; ++i) {
          if (source[(lane + i) * row_stride + j] == 0) to[i] = -std::numeric_limits<T>::infinity();
        }
      }
      continue;
    }
    for (int64_t j = 0; j < keys; j += S::kWidth) {
      const int64_t n = smaller(keys - j, S::kWidth);
      typename S::Vec tile[S::kWidth];
      for (int i = 0; i < S::kWidth; ++i) {
        if (lane + i >= strip.count) {
          tile[i] = S::set(T(0));
          continue;
        }
        const uint8_t* row = source + (lane + i) * row_stride + j;
        uint8_t bytes[S::kWidth];
        if (n < S::kWidth) {
          memset(bytes, 1, sizeof(bytes));
          memcpy(bytes, row, static_cast<size_t>(n));
          row = bytes;
        }
        tile[i] = S::load_bool_bias(row);
      }
      transpose<T>(tile);
      for (int64_t i = 0; i < n; ++i) S::store(mask + (j + i) * kLanes<P> + lane, tile[i]);
    }
  }
}

// Returns one element of a mask as the number to add, which is 0 or -inf for a boolean mask.
template <class T>
SELFATTN_INLINE T mask_bias(const void* mask, DType dtype, int64_t index) {
  const T x = load_element<T>(mask, dtype, index);
  if (dtype != DType::kBool) return x;
  return x != T(0) ? T(0) : -std::numeric_limits<T>::infinity();
}

// Loads the mask of a block, transposed, as numbers to add; -inf hides. Returns whether any position is
// visible.
template <class P>
bool load_mask_block(const AttentionParams& p, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                     Scalar<P>* mask) {
  using T = Scalar<P>;
  using S = Simd<T>;
  constexpr int64_t ld = kLanes<P>;
  const T hidden = -std::numeric_limits<T>::infinity();
  const bool boolean = p.mask.dtype == DType::kBool;
  const int64_t row_stride = p.mask.stride[2], key_stride = p.mask.stride[3];
  const void* source = element(p.mask.data, p.mask.dtype,
                               p.mask.offset(strip.batch, strip.head, strip.first) + key * key_stride);
  const int64_t lanes = strip.vecs * S::kWidth;
  if (row_stride == 0) {
    for (int64_t j = 0; j < keys; ++j) {
      const auto x = S::set(mask_bias<T>(source, p.mask.dtype, j * key_stride));
      for (int64_t lane = 0; lane < lanes; lane += S::kWidth) S::store(mask + j * ld + lane, x);
    }
  } else if (key_stride == 1 && !boolean) {
    load_transposed<T>(mask, ld, source, p.mask.dtype, row_stride, strip.count, keys, T(1));
  } else if (key_stride == 1) {
    load_bool_transposed(mask, static_cast<const uint8_t*>(source), row_stride, strip, keys);
  } else {
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        mask[j * ld + lane] = lane < strip.count
                                  ? mask_bias<T>(source, p.mask.dtype, lane * row_stride + j * key_stride)
                                  : T(0);
      }
    }
  }
  // Rows of a mask are far apart in memory, which hardware does not foresee. Prefetching the next block's
  // lets the products of this one hide the latency of memory.
  if (row_stride != 0 && key_stride == 1 && key + keys < strip.keys.end) {
    const int64_t size = size_of(p.mask.dtype);
    prefetch_block(element(source, p.mask.dtype, keys), row_stride * size, strip.count, keys * size);
  }
  auto visible = S::less(S::set(T(0)), S::set(T(0)));
  for (int64_t lane = 0; lane < lanes; lane += S::kWidth) {
    // Lanes past the last query hold zeros; they must not make a hidden block look visible.
    T buffer[S::kWidth];
    auto largest = S::set(hidden);
    for (int64_t j = 0; j < keys; ++j) {
      const auto x = S::load(mask + j * ld + lane);
      largest = S::select(S::equal(x, S::set(hidden)), largest, S::set(T(0)));
    }
    if (lane + S::kWidth > strip.count) {
      S::store(buffer, largest);
      for (int64_t i = strip.count - lane; i < S::kWidth; ++i) buffer[i] = hidden;
      largest = S::load(buffer);
    }
    visible = S::either(visible, S::less(S::set(hidden), largest));
  }
  return S::any(visible);
}

// Fills first_key and end_key for the block. Returns whether some lane's window does not cover it.
template <class P>
bool window_of_block(const AttentionParams& p, const QueryStrip<P>& strip, int64_t key, int64_t keys,
                     const BlockScratch<P>& scratch) {
  using T = Scalar<P>;
  const KeyRange low = visible_keys(p, strip.first, strip.first);
  const KeyRange high = visible_keys(p, strip.first + strip.count - 1, strip.first + strip.count - 1);
  // Windows move with the query: the last query's begins last and the first query's ends first.
  if (high.begin <= key && low.end >= key + keys) return false;
  for (int64_t lane = 0; lane < strip.vecs * Simd<T>::kWidth; ++lane) {
    const KeyRange range = visible_keys(p, strip.first + lane, strip.first + lane);
    scratch.first_key[lane] = static_cast<T>(clamp_key(range.begin - key, keys));
    scratch.end_key[lane] = static_cast<T>(clamp_key(range.end - key, keys));
  }
  return true;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
