// From dot products to final scores: what common/score_tile.cuh does to single elements, on accumulators.
#pragma once

#include "../common/ptx_sm80.cuh"
#include "visibility.cuh"

namespace selfattn::cuda::sm80 {

// Calls body(strip, half, tile, i, score) for every element of a lane; i counts its two columns.
template <class C, class Body>
__device__ __forceinline__ void for_each_score(Scores<C>& scores, const Body& body) {
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < C::kKeyTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) body(strip, half, tile, i, scores.at[strip][tile][2 * half + i]);
      }
    }
  }
}

// Replaces, so that NaN of hidden keys ends here.
template <class C>
__device__ __forceinline__ void hide_by_position(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                                 int first_key, Scores<C>& scores) {
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row = work.row(plan, lane.row(strip, half));
      const Columns columns = visible_columns<C>(plan, work, row.query, first_key);
#pragma unroll
      for (int tile = 0; tile < C::kKeyTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!columns.hold(lane.key(tile) + i)) scores.at[strip][tile][2 * half + i] = -infinity<float>();
        }
      }
    }
  }
}

// tanh to a few units of 2^-24, absolutely: plenty for scores of 16-bit numbers.
__device__ __forceinline__ float quick_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(x * 2.8853900817779268f));
}

// Two neighbouring elements of a mask; the second only where it exists.
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

__device__ __forceinline__ float mask_value(float x, DType) { return x; }
__device__ __forceinline__ float mask_value(double x, DType) { return from_double<float>(x); }
__device__ __forceinline__ float mask_value(uint16_t x, DType dtype) {
  return dtype == DType::kBFloat16 ? float_from_bfloat16(x) : float_from_float16(x);
}

// Adds a float mask whose elements are stored as T.
template <class C, class T>
__device__ __forceinline__ void add_mask(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                         int first_key, Scores<C>& scores) {
  const View& mask = plan.params.mask;
  const int left = static_cast<int>(plan.params.keys) - first_key;
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row = work.row(plan, lane.row(strip, half));
      const T* of_row = static_cast<const T*>(mask.data) + mask.offset(work.batch, row.head, row.query) +
                        (first_key + lane.key(0)) * mask.stride[3];
#pragma unroll
      for (int tile = 0; tile < C::kKeyTiles; ++tile) {
        const int key = lane.key(tile);
        if (key >= left) continue;
        T pair[2];
        load_pair(of_row + tile * 8 * mask.stride[3], mask.stride[3], plan.mask_pairs, key + 1 < left, pair);
        scores.at[strip][tile][2 * half] += mask_value(pair[0], mask.dtype);
        scores.at[strip][tile][2 * half + 1] += mask_value(pair[1], mask.dtype);
      }
    }
  }
}

// Every option, each in a pass of its own over the registers: a flag is asked once, not for every element.
template <class C>
__device__ __forceinline__ void apply_options(const Plan& plan, const Work<C>& work, const Lane<C>& lane,
                                              int first_key, const MaskBits<C>& mask, Scores<C>& scores) {
  const AttentionParams& p = plan.params;
  for_each_score(scores, [&](int, int, int, int, float& s) { s = rounded_product(s, plan.scale); });
  if (p.softcap != 0.0) {
    const float cap = static_cast<float>(p.softcap), inverse = 1.0f / cap;
    for_each_score(scores, [&](int, int, int, int, float& s) {
      const float x = rounded_product(s, inverse);
      s = rounded_product(cap, C::kFloat32 ? hyperbolic_tangent(x) : quick_tanh(x));
    });
  }
  if (p.alibi_slopes.data != nullptr) {
    for_each_score(scores, [&](int strip, int half, int tile, int i, float& s) {
      const RowOf row = work.row(plan, lane.row(strip, half));
      const int64_t distance = row.query + p.query_offset - (first_key + lane.key(tile) + i);
      s -= rounded_product(head_scalar(p.alibi_slopes, work.batch, row.head),
                           static_cast<float>(distance < 0 ? -distance : distance));
    });
  }
  if (p.mask.data == nullptr) return;
  switch (p.mask.dtype) {
    case DType::kBool:
      break;
    case DType::kBFloat16:
    case DType::kFloat16:
      add_mask<C, uint16_t>(plan, work, lane, first_key, scores);
      break;
    case DType::kFloat32:
      add_mask<C, float>(plan, work, lane, first_key, scores);
      break;
    case DType::kFloat64:
      add_mask<C, double>(plan, work, lane, first_key, scores);
      break;
  }
  for_each_score(scores, [&](int strip, int half, int tile, int i, float& s) {
    if (!mask.shows(lane, strip, half, tile, i)) s = -infinity<float>();
  });
}

}  // namespace selfattn::cuda::sm80
