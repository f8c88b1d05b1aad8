// Values of NaN and Inf in 16-bit types: a key that a row may not see must not spoil it.
//
// A weight of 0 does not hide such values. Normally no kernel looks for them. If the result turns out not to
// be finite, the block starts over with such values zeroed as they arrive, and at the end adds them to the
// rows that see them. Their weights need not be known for that: the product of NaN or Inf and anything
// positive is NaN or Inf.
#pragma once

#include "../common/dropout.cuh"
#include "../common/element.cuh"
#include "visibility.cuh"

namespace selfattn::cuda::mma {

// Whether all bits of the exponent are ones.
template <DType kDType>
__device__ __forceinline__ bool is_non_finite(uint16_t x) {
  constexpr uint32_t kExponent = kDType == DType::kBFloat16 ? 0x7f80u : 0x7c00u;
  return (x & kExponent) == kExponent;
}

// Adds these values to the rows that see them. Each warp searches all keys of the block for its own rows.
template <class C>
__device__ __forceinline__ void add_non_finite_values(const Plan& plan, const Work<C>& work,
                                                      const Lane<C>& lane, Output<C>& output) {
  using E = Element<C::kDType>;
  const AttentionParams& p = plan.params;
#pragma unroll 1
  for (int key = work.begin; key < work.end; ++key) {
    const uint16_t* values = key_row<uint16_t>(p, p.value, work.first_value, work, key);
    bool found = false;
#pragma unroll 1
    for (int column = lane.lane; column < p.value_dim; column += kWarp) {
      found |= is_non_finite<C::kDType>(values[column]);
    }
    if (!__any_sync(kWholeWarp, found)) continue;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowOf row = work.row(lane.row(strip, half));
        if (!sees<!C::kBare>(p, work, row, key)) continue;
        const DropoutPattern<float> dropout(p.dropout, work.batch, row.head);
        const bool dropped = dropout.enabled() && dropout.factor(dropout.words(row.query, key), key) == 0.0f;
        const float weight = dropped ? 0.0f : 1.0f;
#pragma unroll
        for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = lane.dim(tile) + i;
            if (column >= p.value_dim || !is_non_finite<C::kDType>(values[column])) continue;
            output.at[strip][tile][2 * half + i] += weight * E::widen(values[column]);
          }
        }
      }
    }
  }
}

}  // namespace selfattn::cuda::mma
