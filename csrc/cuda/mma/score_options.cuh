// The options that turn dot products into final scores, applied to accumulators. common/score_tile.cuh does
// the same to single elements.
#pragma once

#include "../function/function_tile.cuh"
#include "fragments.cuh"
#include "visibility.cuh"

namespace selfattn::cuda::mma {

// Replaces hidden scores by -inf, so that NaN of hidden keys ends here.
template <class C>
__device__ __forceinline__ void hide_by_position(const Work<C>& work, const Lane<C>& lane, int first_key,
                                                 Scores<C>& scores) {
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row = work.row(lane.row(strip, half));
      const Columns columns = visible_columns(work, row.query, first_key);
#pragma unroll
      for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!columns.hold(lane.column(tile) + i)) scores.at[strip][tile][2 * half + i] = -infinity<float>();
        }
      }
    }
  }
}

// exp to a few units in the last place.
__device__ __forceinline__ float quick_exp(float x) {
  return ptx::exp2_approx(x * static_cast<float>(kLog2E));
}

// tanh with an absolute error of a few 2^-24: plenty for scores of 16-bit numbers.
__device__ __forceinline__ float quick_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(x * static_cast<float>(2 * kLog2E)));
}

// The distance between the positions of a query and a key, which ALiBi multiplies its slope with.
template <class Place>
__device__ __forceinline__ float distance(const Place& at, int query, int key) {
  const int64_t n = query + at.query_offset() - key;
  return static_cast<float>(n < 0 ? -n : n);
}

// Loads two neighbouring elements of a mask, the second only where it exists.
template <class T>
__device__ __forceinline__ void load_pair(const T* at, int64_t stride, bool vector, bool second,
                                          T (&pair)[2]) {
  struct __align__(2 * sizeof(T)) Pair {
    T x, y;
  };
  if (vector) {
    const Pair both = *reinterpret_cast<const Pair*>(at);
    pair[0] = both.x;
    pair[1] = both.y;
  } else {
    pair[0] = at[0];
    pair[1] = second ? at[stride] : T(0);
  }
}

__device__ __forceinline__ float widened(float x, DType) { return x; }
__device__ __forceinline__ float widened(double x, DType) { return from_double<float>(x); }
__device__ __forceinline__ float widened(uint16_t x, DType dtype) {
  return dtype == DType::kBFloat16 ? float_from_bfloat16(x) : widened_float16(x);
}

// Adds a float tensor of shape (batch, heads, queries, keys) whose elements are stored as T.
template <class T, class Place, int kStrips, int kTiles>
__device__ __forceinline__ void add_tensor(const Place& at, const View& tensor, bool pairs,
                                           float (&scores)[kStrips][kTiles][4]) {
  const int keys = at.keys(), queries = at.queries();
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Place::kColumnsAreKeys) {
        const RowOf row = at.query(strip, half, 0, 0);
        const int first = at.key(strip, half, 0, 0);
        const T* of_row = static_cast<const T*>(tensor.data) +
                          tensor.offset(at.batch(), row.head, row.query) + first * tensor.stride[3];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int key = first + tile * 8;
          if (key >= keys) continue;
          T pair[2];
          load_pair(of_row + tile * 8 * tensor.stride[3], tensor.stride[3], pairs, key + 1 < keys, pair);
          scores[strip][tile][2 * half] += widened(pair[0], tensor.dtype);
          scores[strip][tile][2 * half + 1] += widened(pair[1], tensor.dtype);
        }
      } else {
        const RowOf column = at.query(strip, half, 0, 0);
        const T* of_key = static_cast<const T*>(tensor.data) +
                          tensor.offset(at.batch(), column.head, column.query) +
                          at.key(strip, half, 0, 0) * tensor.stride[3];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int n = tile * 8 + i;
            if (column.query + n >= queries) continue;
            scores[strip][tile][2 * half + i] += widened(of_key[n * tensor.stride[2]], tensor.dtype);
          }
        }
      }
    }
  }
}

// The call's function, placed on one element.
template <class Place>
__device__ __forceinline__ FunctionTile<float> function_at(const Place& at, SeenTile seen, int strip,
                                                           int half, int tile, int i) {
  const RowOf row = at.query(strip, half, tile, i);
  FunctionTile<float> function(at.params().function, at.batch(), row.head, row.query);
  function.move_to(at.key(strip, half, tile, i));
  function.see(seen);
  return function;
}

// Applies every option that does not hide keys, each in a pass of its own over the registers, so that its
// flag is tested once and not for every element. A function makes -inf of what it hides. Callers that need
// the slope of the softcap get tanh(score / softcap) of every element by `capped`, and those that need what
// the function was given get it by `given`; both are called like for_each_element's body.
template <class Place, int kStrips, int kTiles, class Capped, class Given>
__device__ __forceinline__ void apply_options(const Place& at, float scale, bool mask_pairs,
                                              float (&scores)[kStrips][kTiles][4], const Capped& capped,
                                              const Given& given) {
  const AttentionParams& p = at.params();
  for_each_element(scores, [&](int, int, int, int, float& s) { s = rounded_product(s, scale); });
  if (p.softcap != 0.0) {
    const float cap = static_cast<float>(p.softcap), inverse = 1.0f / cap;
    for_each_element(scores, [&](int strip, int half, int tile, int i, float& s) {
      const float x = rounded_product(s, inverse);
      const float tanh = Place::kFloat32 ? hyperbolic_tangent(x) : quick_tanh(x);
      capped(strip, half, tile, i, tanh);
      s = rounded_product(cap, tanh);
    });
  }
  if (p.alibi_slopes.data != nullptr) {
    for_each_element(scores, [&](int strip, int half, int tile, int i, float& s) {
      const RowOf row = at.query(strip, half, tile, i);
      s -= rounded_product(head_scalar<float>(p.alibi_slopes, at.batch(), row.head),
                           distance(at, row.query, at.key(strip, half, tile, i)));
    });
  }
  if constexpr (FunctionTile<float>::kAny) {
    const SeenTile seen = at.seen();
    for_each_element(scores, [&](int strip, int half, int tile, int i, float& s) {
      given(strip, half, tile, i, s);
      s = function_at(at, seen, strip, half, tile, i).score(0, 0, s);
    });
  }
  if (p.mask.data == nullptr) return;
  switch (p.mask.dtype) {
    case DType::kBool:
      break;
    case DType::kBFloat16:
    case DType::kFloat16:
      add_tensor<uint16_t>(at, p.mask, mask_pairs, scores);
      break;
    case DType::kFloat32:
      add_tensor<float>(at, p.mask, mask_pairs, scores);
      break;
    case DType::kFloat64:
      add_tensor<double>(at, p.mask, mask_pairs, scores);
      break;
  }
}

// Hides what the mask hides, whatever the scores are.
template <class C>
__device__ __forceinline__ void hide_by_mask(const Lane<C>& lane, const MaskBitsOf<C>& mask,
                                             Scores<C>& scores) {
  for_each_element(scores.at, [&](int strip, int half, int tile, int i, float& s) {
    if (!mask.shows(lane.quad, strip, half, tile, i)) s = -infinity<float>();
  });
}

}  // namespace selfattn::cuda::mma
