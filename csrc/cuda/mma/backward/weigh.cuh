// From the products of a tile to weights and gradients of scores, in registers.
#pragma once

#include "backward_place.cuh"

namespace selfattn::cuda::mma::backward {

// The sums of -dS * distance over the keys of a row, which are its part of the gradients of ALiBi's slopes.
template <class C>
struct Slopes {
  float sum[C::kStrips][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) sum[strip][0] = sum[strip][1] = 0.0f;
  }

  __device__ __forceinline__ void add(const Place<C>& at, Scores<C>& ds) {
    for_each_element(ds.at, [&](int strip, int half, int tile, int i, float& gradient) {
      const RowOf row = at.query(strip, half, tile, i);
      sum[strip][half] =
          fmaf(-gradient, distance(at, row.query, at.key(strip, half, tile, i)), sum[strip][half]);
    });
  }

  // Collective of the warp.
  __device__ __forceinline__ void write(const Plan& plan, const Work<C>& work, const Lane<C>& lane) {
    auto* rows = static_cast<float*>(plan.arguments.grad_slopes_rows);
    if (rows == nullptr) return;
    const AttentionParams& p = plan.params;
    rows += p.row(work.query_batch, work.head, work.first_query + work.first_row);
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = sum_of_row(sum[strip][half]);
        const int row = lane.row(strip, half);
        if (row < work.rows && lane.quad == 0) rows[row] = total;
      }
    }
  }
};

// Which elements of a tile dropout keeps: bit 2 * half + i of four for every eight columns.
template <class C>
struct Kept {
  uint32_t of[C::kStrips][(C::kColumnTiles + 7) / 8];

  __device__ __forceinline__ void make(const Place<C>& at) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      const StripDropout<Place<C>> dropout(at, strip);
#pragma unroll
      for (int tile = 0; tile < C::kColumnTiles; ++tile) {
        if (tile % 8 == 0) of[strip][tile / 8] = 0;
        of[strip][tile / 8] |= dropout.kept(tile) << tile % 8 * 4;
      }
    }
  }
  __device__ __forceinline__ bool holds(int strip, int half, int tile, int i) const {
    return of[strip][tile / 8] >> (tile % 8 * 4 + half * 2 + i) & 1u;
  }
};

// Calls body(strip, half, tile, i, element of s, element of dp) for every element of a lane.
template <class C, class Body>
__device__ __forceinline__ void for_each_pair(Scores<C>& s, Scores<C>& dp, const Body& body) {
  for_each_element(s.at, [&](int strip, int half, int tile, int i, float& score) {
    body(strip, half, tile, i, score, dp.at[strip][tile][2 * half + i]);
  });
}

__device__ __forceinline__ float pick(float2 pair, int i) { return i == 0 ? pair.x : pair.y; }

// Whether a query of the tile saw no key, or only scores of -inf.
template <class C, class Shared>
__device__ __forceinline__ bool is_dead(const Shared& shared, int query_of_tile) {
  return C::kBare ? shared.shift()[query_of_tile] == infinity<float>()
                  : shared.inverse_sum()[query_of_tile] == 0.0f;
}

// exp(score - shift) / sum of a query. If another order of summation made a product larger than the row's
// maximum, it counts as the maximum: the rounding error of large scores may be any number of powers of two.
__device__ __forceinline__ float formula_weight(float score, float shift, float inverse_sum) {
  const float difference = score - shift;
  return quick_exp(difference > 0.0f ? 0.0f : difference) * inverse_sum;
}

// The weight of an element whose query has large scores.
template <class C>
__device__ __forceinline__ float large_weight(const Place<C>& at, int strip, int half, int tile, int i,
                                              float dot) {
  const Statistics& statistics = at.plan.statistics;
  const int64_t query = C::kOwnsQueries ? at.work.own_statistic + at.lane.row(strip, half)
                                        : at.work.first_statistic + at.passing.head * statistics.queries +
                                              at.passing.first + at.lane.column(tile) + i;
  return formula_weight(rounded_product(dot, at.plan.scale), statistics.large_shift[query],
                        statistics.inverse_sum[query]);
}

// Weighs for bare kernels: scale and log2(e) are one factor, sum and maximum one number.
template <class C, class Shared>
__device__ __forceinline__ void weigh_bare(const Place<C>& at, const Shared& shared, Scores<C>& s,
                                           Scores<C>& dp) {
  const float* deltas = at.deltas(shared);
#pragma unroll
  for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 shift = at.of_queries(shared.shift(), strip, half, tile);
        float2 delta = {0.0f, 0.0f};
        if constexpr (C::kNeedsDP) delta = at.of_queries(deltas, strip, half, tile);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& weight = s.at[strip][tile][2 * half + i];
          const float exponent = fmaf(weight, at.plan.scale_log2, -pick(shift, i));
          const bool large = C::kCareful && pick(shift, i) != pick(shift, i);
          weight = large ? large_weight(at, strip, half, tile, i, weight) : ptx::exp2_approx(exponent);
          if constexpr (C::kNeedsDP) {
            float& gradient = dp.at[strip][tile][2 * half + i];
            gradient = weight * (gradient - pick(delta, i));
          }
        }
      }
    }
  }
}

// Turns dp into the gradient of the weights before dropout, less delta.
template <class C, class Shared>
__device__ __forceinline__ void centre_gradients(const Place<C>& at, const Shared& shared,
                                                 const Kept<C>& kept, Scores<C>& dp) {
  const View& grad_weights = at.plan.arguments.grad_weights;
  if (grad_weights.data != nullptr) {
    using Storage = typename Element<C::kDType>::Storage;
    add_tensor<Storage>(at, grad_weights, false, dp.at);
  }
  if (at.plan.params.dropout.enabled) {
    for_each_element(dp.at, [&](int strip, int half, int tile, int i, float& gradient) {
      gradient *= kept.holds(strip, half, tile, i) ? at.plan.dropout_scale : 0.0f;
    });
  }
  for_each_element(dp.at, [&](int strip, int half, int tile, int i, float& gradient) {
    gradient -= pick(at.of_queries(at.deltas(shared), strip, half, tile), i);
  });
}

// Weighs with every option, by passes over the registers as in the forward.
template <class C, class Shared>
__device__ __forceinline__ void weigh_options(const Place<C>& at, const Shared& shared, Scores<C>& s,
                                              Scores<C>& dp, Scores<C>& cap_slope, Scores<C>& given) {
  const AttentionParams& p = at.plan.params;
  Kept<C> kept;
  if (p.dropout.enabled) kept.make(at);
  if constexpr (C::kNeedsDP) centre_gradients(at, shared, kept, dp);
  apply_options(
      at, at.plan.scale, at.plan.mask_pairs, s.at,
      [&](int strip, int half, int tile, int i, float tanh) {
        const float slope = fmaf(-tanh, tanh, 1.0f);
        // The side of queries also needs the gradient of the capped score, for ALiBi's slopes. A hidden
        // element's gradient is 0 when the two are multiplied, and fmaxf makes 0 of a slope of NaN.
        if constexpr (C::kSide == Side::kQuery) {
          cap_slope.at[strip][tile][2 * half + i] = fmaxf(slope, 0.0f);
        }
        if constexpr (C::kSide != Side::kMask && C::kSide != Side::kQuery && C::kNeedsDP) {
          dp.at[strip][tile][2 * half + i] *= slope;
        }
      },
      [&](int strip, int half, int tile, int i, float score) {
        given.at[strip][tile][2 * half + i] = score;
      });
  for_each_pair(s, dp, [&](int strip, int half, int tile, int i, float& score, float& gradient) {
    const float shift = pick(at.of_queries(shared.shift(), strip, half, tile), i);
    const float inverse_sum = pick(at.of_queries(shared.inverse_sum(), strip, half, tile), i);
    if (FunctionTile<float>::kAny && score == -infinity<float>()) {
      score = gradient = 0.0f;  // the function hides it, whatever both products were
    } else {
      score = formula_weight(score, shift, inverse_sum);
    }
  });
  if constexpr (C::kNeedsDP) {
    for_each_pair(s, dp, [](int, int, int, int, float& weight, float& gradient) { gradient *= weight; });
  }
  if (C::kSumsVO && p.dropout.enabled) {
    for_each_element(s.at, [&](int strip, int half, int tile, int i, float& weight) {
      weight *= kept.holds(strip, half, tile, i) ? 1.0f : 0.0f;
    });
  }
}

// Zeroes the weights and gradients of hidden elements, whatever they are, NaN included.
template <class C, class Shared>
__device__ __forceinline__ void hide(const Place<C>& at, const Shared& shared, const MaskBits<C>& mask,
                                     bool careful, Scores<C>& s, Scores<C>& dp) {
  const auto clear = [](float& weight, float& gradient) {
    weight = 0.0f;
    if constexpr (C::kNeedsDP) gradient = 0.0f;
  };
  if (!sees_whole_tile(at)) {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Columns columns = visible_columns(at, at.lane.row(strip, half));
#pragma unroll
        for (int tile = 0; tile < C::kColumnTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (columns.hold(at.lane.column(tile) + i)) continue;
            clear(s.at[strip][tile][2 * half + i], dp.at[strip][tile][2 * half + i]);
          }
        }
      }
    }
  }
  if constexpr (!C::kBare) {
    if (at.plan.params.mask.data != nullptr) {
      for_each_pair(s, dp, [&](int strip, int half, int tile, int i, float& weight, float& gradient) {
        if (!mask.shows(at.lane.quad, strip, half, tile, i)) clear(weight, gradient);
      });
    }
  }
  // Queries that saw only scores of -inf have no gradients either.
  if (careful) {
    for_each_pair(s, dp, [&](int strip, int half, int tile, int i, float& weight, float& gradient) {
      const int query = C::kOwnsQueries ? at.lane.row(strip, half) : at.lane.column(tile) + i;
      if (is_dead<C>(shared, query)) clear(weight, gradient);
    });
  }
}

// s: dot products of queries and keys. They become the weights P after dropout, without the factor
// plan.dropout_scale, which the result gets. dp: dot products of dO and values. They become the gradients of
// the dot products without the factor plan.scale, which the result gets, too; on the side of masks those of
// the scores. Sides that do not need dp leave it undefined. careful: whether there may be NaN or Inf. Shared:
// a kernel's shared memory, of which the statistics of the tile's queries are used.
template <class C, class Shared>
__device__ __forceinline__ void weigh(const Place<C>& at, const Shared& shared, const MaskBits<C>& mask,
                                      Slopes<C>& slopes, bool careful, Scores<C>& s, Scores<C>& dp) {
  if constexpr (C::kBare) {
    weigh_bare(at, shared, s, dp);
    hide(at, shared, mask, careful, s, dp);
  } else {
    Scores<C> cap_slope, given;
    weigh_options(at, shared, s, dp, cap_slope, given);
    hide(at, shared, mask, careful, s, dp);
    if constexpr (FunctionTile<float>::kAny && C::kSide != Side::kMask && C::kNeedsDP) {
      for_each_pair(given, dp, [&](int strip, int half, int tile, int i, float& score, float& gradient) {
        gradient = function_at(at, {}, strip, half, tile, i).gradient(0, 0, score, gradient);
      });
    }
    if constexpr (C::kSide == Side::kQuery) {
      if (at.plan.arguments.grad_slopes_rows != nullptr) slopes.add(at, dp);
      if (at.plan.params.softcap != 0.0) {
        for_each_pair(cap_slope, dp,
                      [](int, int, int, int, float& slope, float& gradient) { gradient *= slope; });
      }
    }
  }
}

}  // namespace selfattn::cuda::mma::backward
