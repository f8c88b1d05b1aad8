#include "instances.h"
#include "statistics.cuh"

namespace selfattn::cuda::sm80::backward {

void pad_statistics(const AttentionParams& p, const Statistics& to, bool plain, const Launch& where) {
  const int64_t rows_of_head = round_up(p.queries, kQueryPadding);
  const int64_t count = p.batch * p.heads * rows_of_head;
  const auto from = rows::row_gradients_in<float>(where.workspace, p);
  launch_blocks(plain ? &statistics_kernel<true> : &statistics_kernel<false>,
                divide_up(count, kStatisticsThreads), kStatisticsThreads, 0, where, p, from, to,
                rows_of_head);
}

}  // namespace selfattn::cuda::sm80::backward
