// Statistics of the queries, padded for kernels that copy 16 bytes at a time.
#pragma once

#include "../../common/elementary.cuh"
#include "../../common/grid.cuh"
#include "../../common/sequence.cuh"
#include "../../rows/rows.h"
#include "../forward_plan.h"
#include "backward_plan.h"

namespace selfattn::cuda::mma::backward {

constexpr int kStatisticsThreads = 256;

// Beyond this, the rounding of a row's log2 of the sum to float is more than 2^-12 of the weights: an eighth
// of bfloat16's own rounding, as much as float16's.
constexpr float kLargeScore = 2048.0f;

// Each thread has one of the `rows_of_head` queries of a head: as many as the longest sequence has, padded.
// Queries that do not exist get a weight of 0. Bare kernels raise 2 to a power, and need one number for shift
// and sum. It is +inf for a row that saw nothing. In a row of large scores its rounding would be a factor of
// all weights: there it is NaN, so that the block starts over and reads shift and sum (weigh_bare).
template <bool kBare>
__global__ void __launch_bounds__(kStatisticsThreads, 1)
    statistics_kernel(const AttentionParams p, const rows::RowGradients<float> from, const Statistics to,
                      int64_t rows_of_head, int64_t first_block) {
  const int64_t index = (first_block + blockIdx.x) * kStatisticsThreads + threadIdx.x;
  const int64_t query = index % rows_of_head, head_index = index / rows_of_head;
  const int64_t head = head_index % p.heads, batch = head_index / p.heads;
  if (batch >= p.batch) return;
  const Sequence sequence = sequence_of(p, batch);
  if (query >= round_up(sequence.queries, kQueryPadding)) return;
  const int64_t at = first_statistic_of(p, sequence, head) + query;
  const int64_t n = to.first(p, batch, sequence.first_query) + head * to.queries + query;
  const bool exists = query < sequence.queries;
  const float shift = exists ? from.shift[at] : 0.0f;
  const float inverse_sum = exists ? from.inverse_sum[at] : 0.0f;
  if (kBare) {
    const float log2_sum = fmaf(shift, static_cast<float>(kLog2E), -log2f(inverse_sum));
    const bool large = fabsf(shift) > kLargeScore;
    to.shift[n] = inverse_sum == 0.0f ? infinity<float>() : large ? nanf("") : log2_sum;
    to.large_shift[n] = shift;
  } else {
    to.shift[n] = shift;
  }
  to.inverse_sum[n] = inverse_sum;
  to.delta[n] = exists ? from.delta[at] : 0.0f;
}

}  // namespace selfattn::cuda::mma::backward
