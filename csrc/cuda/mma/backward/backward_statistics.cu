#include "backward_statistics.cuh"

namespace selfattn::cuda::mma::backward {

Statistics prepare_statistics(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  rows::prepare(p, a, where.workspace, where);
  const Statistics statistics = statistics_in(where.workspace, p);
  const bool bare = p.dtype != DType::kFloat32 && is_bare(p, a);
  const int64_t rows_of_head = round_up(p.queries, kQueryPadding);
  const int64_t count = p.batch * p.heads * rows_of_head;
  const auto from = rows::row_gradients_in<float>(where.workspace, p);
  launch_blocks(bare ? &statistics_kernel<true> : &statistics_kernel<false>,
                divide_up(count, kStatisticsThreads), kStatisticsThreads, 0, where, p, from, statistics,
                rows_of_head);
  return statistics;
}

}  // namespace selfattn::cuda::mma::backward
