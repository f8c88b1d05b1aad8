// What the kernels ask of each query, brought into the form that they copy to shared memory 16 bytes at a
// time.
#pragma once

#include "../../common/elementary.cuh"
#include "../../common/grid.cuh"
#include "../../rows/rows.h"
#include "../plan.h"
#include "plan.h"

namespace selfattn::cuda::sm80::backward {

constexpr int kStatisticsThreads = 256;

// Queries that do not exist get a weight of 0. Plain kernels raise 2 to a power, and need one number for
// shift and sum: of a row that saw nothing, +inf.
template <bool kPlain>
__global__ void __launch_bounds__(kStatisticsThreads, 1)
    statistics_kernel(const rows::RowGradients<float> from, const Statistics to, int64_t queries,
                      int64_t count, int64_t first_block) {
  const int64_t n = (first_block + blockIdx.x) * kStatisticsThreads + threadIdx.x;
  if (n >= count) return;
  const int64_t query = n % to.queries;
  const int64_t at = n / to.queries * queries + query;
  const bool exists = query < queries;
  const float shift = exists ? from.shift[at] : 0.0f;
  const float inverse_sum = exists ? from.inverse_sum[at] : 0.0f;
  if (kPlain) {
    to.shift[n] = inverse_sum == 0.0f ? infinity<float>()
                                      : fmaf(shift, static_cast<float>(kLog2E), -log2f(inverse_sum));
  } else {
    to.shift[n] = shift;
    to.inverse_sum[n] = inverse_sum;
  }
  to.delta[n] = exists ? from.delta[at] : 0.0f;
}

}  // namespace selfattn::cuda::sm80::backward
