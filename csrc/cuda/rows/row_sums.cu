// Sums the gradients of a head's coefficient over its rows. A block owns a head.
#include "../../core/sequences.h"
#include "../common/grid.cuh"
#include "rows_of_dtype.h"

namespace selfattn::cuda::rows {

namespace {

constexpr int kThreads = 256;

// Each thread adds up every 256th row; then halves of the block are added to each other. The order is the
// same on all devices, and does not depend on other heads.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    row_sums_kernel(const AttentionParams p, const int64_t batches, const T* rows, T* sums,
                    const int64_t first_block) {
  SELFATTN_DYNAMIC_SHARED(memory);
  double* const partial = reinterpret_cast<double*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t block = first_block + blockIdx.x;
  const int64_t head = block % p.heads, own_batch = block / p.heads;

  double sum = 0.0;
  for (int64_t batch = own_batch; batch < own_batch + batches; ++batch) {
    const T* const row = rows + first_row_of(p, batch) + p.row(0, head, 0);
    const int64_t queries = queries_of(p, batch).count;
    for (int64_t query = thread; query < queries; query += kThreads) sum += static_cast<double>(row[query]);
  }
  partial[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) partial[thread] += partial[thread + half];
  }
  if (thread == 0) sums[block] = static_cast<T>(partial[0]);
}

}  // namespace

template <class T>
void sum_of_rows_as(const AttentionParams& p, const T* rows, T* sums, bool shared_by_batch,
                    const Launch& where) {
  const int64_t blocks = (shared_by_batch ? 1 : p.batch) * p.heads, batches = shared_by_batch ? p.batch : 1;
  launch_blocks(&row_sums_kernel<T>, blocks, kThreads, kThreads * sizeof(double), where, p, batches, rows,
                sums);
}

template void sum_of_rows_as<float>(const AttentionParams&, const float*, float*, bool, const Launch&);
template void sum_of_rows_as<double>(const AttentionParams&, const double*, double*, bool, const Launch&);

}  // namespace selfattn::cuda::rows
